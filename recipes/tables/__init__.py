"""Your own table as the data of all recipes.

The config declares what the columns are (`spec`), and `settings` completes and checks it. The files
are read in chunks (`reading`), `rows` gives each row its label and split, and `fitting` makes ids
and numbers of the values. A recipe gets `clicks`, rows with a label, or `interactions` of users
with items, whose features are `entities`. What serving needs is kept with the run.
"""
