"""Pictures of pages, such as scans: the recognized text."""

from raypd.config import InputConfig
from raypd.dataset.formats.base import Fields
from raypd.dataset.formats.documents import TEXT, DocumentFormat
from raypd.dataset.formats.recognition import PageTexts, check_page_count, recognized_page
from raypd.run import Part


class Picture(DocumentFormat):
    """PNG, JPEG and TIFF, which may have several pages."""

    media_types = ("image/png", "image/jpeg", "image/tiff")
    needs_ocr = True

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        return str(self.content(data, part, source)[TEXT])

    def content(self, data: bytes, part: Part, source: InputConfig) -> Fields:
        if source.ocr == "none":
            raise ValueError("a picture, which input.ocr=auto reads")
        texts = PageTexts()
        rows, pages = recognized_page(data, 0)
        check_page_count(pages)
        texts.add_recognized(rows)
        for number in range(1, pages):
            rows, _ = recognized_page(data, number)
            texts.add_recognized(rows)
        if not texts.has_text:
            raise ValueError("no text was recognized in the picture")
        return texts.fields()
