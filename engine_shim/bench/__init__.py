"""How fast the engine is here."""
