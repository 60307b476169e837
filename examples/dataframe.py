"""Extract attributes from the rows of a DataFrame in a durable run on a local Ray.

python examples/dataframe.py
"""

from typing import Literal

import pandas as pd
from pydantic import BaseModel, Field

import raypd


class Listing(BaseModel):
    brand: str | None = Field(None, description="Who makes it")
    color: str | None = None
    condition: Literal["new", "used"] | None = None


frame = pd.DataFrame(
    {
        "id": ["a", "b", "c"],
        "text": [
            "Nordwind rain jacket, men's, navy blue, size L, new with tags",
            "Used Kestrel city bike, green, 28 inch, some scratches",
            "Halmar coffee grinder, stainless steel, as new",
        ],
    }
)

run = raypd.extract(frame, Listing, model="smollm2-135m-instruct", output="runs/example-dataframe")
print(run.to_pandas()[["id", "record"]].to_string(index=False))
worker_seconds = sum(run.bill.seconds.values())
print(f"{run.bill.documents} documents, {worker_seconds:.0f} worker seconds; {run.report()}")
