"""Repetitions within texts, in linear time (Knuth, Morris and Pratt 1977). No I/O."""


def borders(text: str) -> list[int]:
    """For each prefix of a text, the length of the longest shorter one that it ends with."""
    lengths, length = [0], 0
    for character in text[1:]:
        while length and text[length] != character:
            length = lengths[length - 1]
        length += text[length] == character
        lengths.append(length)
    return lengths
