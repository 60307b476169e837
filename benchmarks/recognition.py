"""How fast and how right scans are recognized: 20 pages that are drawn here.

    python -m benchmarks.recognition

prints, for each kind of page, the pages per second of a core and the share of characters that are
right (1 - edit distance / characters).
"""

import io
import time

import duckdb
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from raypd.dataset.file_parsers.ocr import recognized_page

PAGES_OF_A_KIND = 5
LINES = 32
A4_INCHES = (8.27, 11.69)
ENGLISH = (
    "The tenant shall pay the monthly rent of {n},250.00 dollars on the first day of each month.",
    "Invoice no. {n}-2024 of March {n}, total amount due: {n}49.90, payable within 14 days.",
    "Clause {n}: either party may terminate this agreement with three months' written notice.",
    "Ship to: Miller & Sons Ltd., {n} Queen Street, Springfield, phone +1 555 01{n}.",
)
GERMAN = (
    "Die Miete von {n}.250,00 € ist jeweils bis zum dritten Werktag des Monats zu überweisen.",
    "Rechnung Nr. {n}-2024 vom {n}. März über {n}49,90 € inkl. 19 % MwSt., fällig in 14 Tagen.",
    "§ {n}: Beide Parteien können diesen Vertrag schriftlich mit dreimonatiger Frist kündigen.",
    "Lieferadresse: Größe & Söhne GmbH, Äußere Weberstraße {n}, 02763 Zittau, Linie {n}.",
)
# Kind -> (sentences, dots per inch, degrees).
KINDS = {
    "clean, 200 dpi": (ENGLISH, 200, 0.0),
    "rotated by 3 degrees": (ENGLISH, 200, 3.0),
    "150 dpi": (ENGLISH, 150, 0.0),
    "German, 200 dpi": (GERMAN, 200, 0.0),
}


def lines_of(sentences: tuple[str, ...], number: int) -> list[str]:
    """Return the lines of a page; no two pages have the same."""
    lines = []
    for line in range(LINES):
        sentence = sentences[line % len(sentences)]
        lines.append(sentence.format(n=10 + (7 * line + 13 * number) % 89))
    return lines


def drawn(lines: list[str], dpi: int, degrees: float, font_name: str) -> bytes:
    """Return a page as a scanner saves it, in grey and with noise."""
    width, height = (int(inches * dpi) for inches in A4_INCHES)
    page = Image.new("L", (width, height), 250)
    draw = ImageDraw.Draw(page)
    font = ImageFont.truetype(font_manager.findfont(font_name), int(10.5 / 72 * dpi))
    for number, line in enumerate(lines):
        place = (int(0.75 * dpi), int((0.9 + 0.3 * number) * dpi))
        draw.text(place, line, fill=20, font=font)
    page = page.rotate(degrees, resample=Image.Resampling.BICUBIC, fillcolor=250)
    noise = Image.effect_noise((width, height), 24)
    data = io.BytesIO()
    Image.blend(page, noise, 0.08).save(data, "JPEG", quality=80)
    return data.getvalue()


def right_characters(expected: str, recognized: str) -> float:
    """Return the share of characters that are right."""
    query = "select levenshtein($expected, $recognized)"
    values = {"expected": expected, "recognized": recognized}
    distance = duckdb.execute(query, values).fetchone()
    assert distance is not None
    return 1 - float(distance[0]) / len(expected)


def main() -> None:
    """Print the table."""
    fonts = ("DejaVu Serif", "DejaVu Sans", "Liberation Serif", "Liberation Sans", "DejaVu Serif")
    recognized_page(drawn(["warm up"], 200, 0.0, fonts[0]), 0)
    for kind, (sentences, dpi, degrees) in KINDS.items():
        seconds = 0.0
        shares = []
        for number in range(PAGES_OF_A_KIND):
            lines = lines_of(sentences, number)
            data = drawn(lines, dpi, degrees, fonts[number])
            start = time.process_time()
            rows = recognized_page(data, 0)["rows"]
            seconds += time.process_time() - start
            text = "\n".join(" ".join(line["text"] for line in row) for row in rows)
            shares.append(right_characters("\n".join(lines), text))
        pages_per_second = PAGES_OF_A_KIND / seconds
        share = sum(shares) / len(shares)
        print(f"{kind:24} {pages_per_second:.2f} pages/s of a core, {share:.2%} right", flush=True)


if __name__ == "__main__":
    main()
