"""What trains a model, whatever the recipe: layers, losses, optimizers, the step, the mesh."""
