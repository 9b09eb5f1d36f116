"""Plans as what is to run: manifests, tiers of a mesh, places on nodes."""
