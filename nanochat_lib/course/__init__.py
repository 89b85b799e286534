"""The course around the library: building chapters from their source and what their cells need."""
