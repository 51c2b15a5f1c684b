"""Your own table as the data of all recipes.

The config declares what the columns are (`spec`), and `settings` completes and checks it. `source`
reads the files (`formats`) once, types their values (`values`), and splits the rows; `fit` counts
what `transforms` need to turn them into ids and numbers. A recipe gets `clicks`, rows with a label,
or `interactions` of users with items. What serving needs is kept with the run.
"""
