"""Your own table as the data of all recipes.

The config declares what the columns are (`spec`), and `settings` completes and checks it. The files
(`formats`, `source`) are read in chunks (`reading`, `values`), and `rows` gives each row its label
and split (`splitting`). A `store` keeps the rows until queries of it have fitted the transforms of
values to ids and numbers (`fitting`). A recipe gets `clicks`, rows with a label, or `interactions`
of users with items, whose features are `entities`. What serving needs is kept with the run. On a
cluster (`spark`), clicks are written in shards, of which each training process reads its own.
"""
