"""What trains a model, whatever the recipe: layers, features, optimizers."""
