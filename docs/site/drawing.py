"""What the pictures are drawn with: rectangles, words and arrows, as SVG."""

from __future__ import annotations

from html import escape

COLORS = ("#2563c9", "#0f7b5f", "#b58900", "#c2410c", "#7c3aed", "#0e7490")
STYLE = """
  svg { background: #fbfbfa; font: 12px system-ui, "DejaVu Sans", sans-serif; }
  text { fill: #3d444d; } .title { fill: #1d2126; font-size: 14px; font-weight: 600; }
  .group { font-weight: 600; }
  .in { fill: #fff; font-size: 11px; } .gap { fill: #d5d9de; }
  .wait { stroke: #1d2126; stroke-width: 1.2; fill: none; } .tip { fill: #1d2126; }
  .rule { stroke: #8a939e; stroke-dasharray: 3 3; }
"""


class Drawing:
    """Rectangles and words from the top down, as SVG."""

    def __init__(self, label: str, *, width: float = 960) -> None:
        self.label, self.width, self.y = label, width, 12.0
        self.parts: list[str] = []

    def text(self, x: float, text: str, *, kind: str = "", anchor: str = "start", dy: float = 13) -> None:
        place = f'x="{x:.1f}" y="{self.y + dy:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{kind}" {place}>{escape(text)}</text>')

    def title(self, text: str) -> None:
        self.text(8, text, kind="title")
        self.y += 26

    def box(self, x: float, width: float, *, fill: str = "", inside: str = "", tip: str = "") -> None:
        """A rectangle on this line; words inside it, if they fit."""
        paint = f'fill="{fill}"' if fill else 'class="gap"'
        self.parts.append(
            f'<rect {paint} x="{x:.1f}" y="{self.y:.1f}" width="{max(width - 1, 1):.1f}" height="18" rx="2">'
            f"<title>{escape(tip or inside or 'padding')}</title></rect>"
        )
        if inside and width > 7 * len(inside) + 4:
            self.text(x + width / 2, inside, kind="in", anchor="middle")

    def rules(self, places: list[float], top: float) -> None:
        """Upright lines from `top` to here."""
        self.parts += [
            f'<line class="rule" x1="{x:.1f}" y1="{top - 4:.1f}" x2="{x:.1f}" y2="{self.y:.1f}"/>'
            for x in places
        ]

    def arrow(self, source: tuple[float, float], target: tuple[float, float], *, beneath: int) -> None:
        """From the end of one box to the beginning of one to its right, beneath what was drawn since then."""
        (x, y), (to_x, to_y) = source, target
        bend = f"M{x:.1f} {y:.1f} C{x + 12:.1f} {y:.1f} {to_x - 16:.1f} {to_y:.1f} {to_x - 5:.1f} {to_y:.1f}"
        tip = f"M{to_x - 7:.1f} {to_y - 4:.1f} L{to_x:.1f} {to_y:.1f} L{to_x - 7:.1f} {to_y + 4:.1f} Z"
        self.parts.insert(beneath, f'<path class="wait" d="{bend}"/>')
        self.parts.append(f'<path class="tip" d="{tip}"/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width:.0f} {self.y + 8:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.label)}">'
        return "\n".join([head, f"<style>{STYLE}</style>", *self.parts, "</svg>", ""])
