"""What a mesh file may hold, by subject. `services.mesh_file` reads mesh files."""
