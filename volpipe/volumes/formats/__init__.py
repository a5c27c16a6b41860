"""One format a file: how its metadata are read and its voxels found. Bytes themselves are moved in storage."""
