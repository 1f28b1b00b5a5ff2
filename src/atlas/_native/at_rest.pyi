STATE_NAMES: tuple[str, ...]
