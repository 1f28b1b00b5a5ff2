"""The C header, as a package: ``importlib.resources.files("atlas.include") / "atlas.h"``."""
