"""Written arithmetic in columns: the working in replies of both editions. No I/O."""


def columns_added(a: int, b: int) -> list[str]:
    """Column addition from the units up: `7+9=16`, then `4+8+1=13`, ..."""
    x, y = str(a)[::-1], str(b)[::-1]
    lines, carry = [], 0
    for i in range(max(len(x), len(y))):
        p, q = (int(x[i]) if i < len(x) else 0), (int(y[i]) if i < len(y) else 0)
        total = p + q + carry
        lines.append(f"{p}+{q}{'+1' if carry else ''}={total}")
        carry = total // 10
    return lines


def columns_subtracted(a: int, b: int) -> list[str]:
    """Column subtraction of b from a >= b, from the units up: `2-7+10=5`, then `8-4-1=3`, ..."""
    lines, borrow = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i, p in enumerate(x):
        q = int(y[i]) if i < len(y) else 0
        value = int(p) - q - borrow
        lines.append(f"{p}-{q}{'-1' if borrow else ''}{'+10' if value < 0 else ''}={value % 10}")
        borrow = int(value < 0)
    return lines


def columns_multiplied(a: int, b: int) -> list[str]:
    """Long multiplication: one block of products for each digit of b, and their sum in columns."""
    lines, total = [], 0
    for place, q in enumerate(str(b)[::-1]):
        lines.append(f"{a}*{q}:")
        carry = 0
        for p in str(a)[::-1]:
            value = int(p) * int(q) + carry
            lines.append(f"{p}*{q}{f'+{carry}' if carry else ''}={value}")
            carry = value // 10
        part = a * int(q) * 10**place
        lines.append(f"={part}")
        if place:
            lines.append(f"{total}+{part}:")
            lines += columns_added(total, part)
        total += part
    return lines
