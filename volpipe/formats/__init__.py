"""How arrays lie on disk, one format per file; each format library is imported in one of them, where it is used."""
