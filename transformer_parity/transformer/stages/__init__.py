"""The stages of a comparison. Each stage has its own file; base classes and the registry are here as well."""
