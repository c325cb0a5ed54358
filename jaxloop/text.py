"""Text that is safe to display in a terminal or a log."""


def printable(text: object) -> str:
    r"""Returns a text on one line, with everything that a terminal would not show as a character escaped.

    Names of metrics, and texts of files, may hold newlines, carriage returns or escape sequences. Use it wherever one
    of them is displayed; files keep the text as it is.

    >>> print(printable("loss\n\x1b[31m"))
    loss\n\x1b[31m
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in shown)
