"""What trains a model, whatever the recipe: layers, optimizers, the step, the mesh."""
