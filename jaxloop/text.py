"""Text that is safe to display in a terminal or a log."""


def printable(text: object) -> str:
    r"""Returns a text as a single line, with all unprintable characters escaped.

    Names of metrics and texts read from files may contain newlines, carriage returns or escape sequences. Use this
    function wherever they are displayed. Files store the original text.

    >>> print(printable("loss\n\x1b[31m"))
    loss\n\x1b[31m
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
