"""Fetching real data: named data sets, verified file by file, into one folder that outlives the command.

`sets` names them and says where they lie; it loads nothing heavy. `local` looks at what is on disk, `remote` asks where
the rest is, `fetch` gets one file and `pool` many, `finish` makes a data set of them. `get` does all of this for
`nanochat data get`, and `plan` says beforehand what a preset needs.
"""
