"""The settings of the recipes: a file for each data set, in a folder for each recipe."""
