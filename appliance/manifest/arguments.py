"""The words of an engine's command line, as its parser reads them."""


def option_name(word: str) -> str:
    """Return the option of `--option=value` or `--option`, spelled with hyphens: engines take underscores as well."""
    return word.partition("=")[0].replace("_", "-")
