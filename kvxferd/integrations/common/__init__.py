"""What connectors share: a digest of the model, and the agreement of an engine's ranks at its start."""
