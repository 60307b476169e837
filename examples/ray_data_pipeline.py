"""Add a stage to a Ray Data pipeline that gives rows attributes, confidences and cost.

python examples/ray_data_pipeline.py
"""

import ray

from raypd.data import ProcessorConfig, build_processor

TITLES = [
    "Nordwind rain jacket, navy blue",
    "Kestrel city bike, green, 28 inch",
    "Halmar coffee grinder, steel",
]

processor = build_processor(
    ProcessorConfig(
        model="smollm2-135m-instruct",
        schema=[{"name": "Brand"}, {"name": "Color"}],
        text_columns=["title"],
        batch_size=8,
    )
)
listings = ray.data.from_items([{"title": title, "shop": 7} for title in TITLES])
for row in processor(listings).take_all():  # or .write_parquet(...), .write_iceberg(...)
    print(row["shop"], row["title"], row["Brand"], row["Color"], f"{row['seconds']:.2f} s")
bill = processor.bill()
print(f"{bill.documents} documents, {bill.decoded_tokens} tokens decoded")
