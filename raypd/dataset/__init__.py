"""The input: from objects to units of work, and from a unit to its documents."""
