"""The two device meshes, every process group, collectives and shard layouts."""
