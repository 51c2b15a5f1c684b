"""Parts that train a model of any recipe: layers, features, optimizers."""
