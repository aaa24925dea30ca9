"""HTML and SVG as text. Whatever is not `Html` is escaped."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | int | None


def tag(name: str, *content: Content, **attributes: str | float | None) -> Html:
    """An element. `class_` is the attribute class, and `_` in a name stands for `-`."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Html:
    return Html(
        "".join(one if isinstance(one, Html) else escape(str(one)) for one in content if one is not None)
    )


def _number(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
