"""Arguments and options of several commands, or longer than a line: name, limits, help.

Commands hold the defaults.
"""

from typing import Annotated, Literal

from typer import Argument, Option

# ------------------------------------------------------------------------
# of most commands
Config = Annotated[str, Argument(help="YAML of the run; `raypd config show` lists all keys")]
Overrides = Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Keys to set, dotted")]
Run = Annotated[str, Argument(metavar="RUN", help="Folder of a run (its output.path)")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Print what Ray has to say, too")]
AsJson = Annotated[bool, Option("--json", help="Print JSON")]

# ------------------------------------------------------------------------
# quickstart, init
QuickstartTo = Annotated[str, Argument(metavar="DIR", help="A new folder")]
Sampled = Annotated[
    str,
    Argument(help="The data: .jsonl, .csv, .xlsx, .parquet, .txt, .pdf, .docx; a folder, a glob"),
]
ConfigTo = Annotated[
    str | None, Option("--output", "-o", help="Where it goes; none: NAME.yaml here")
]

# ------------------------------------------------------------------------
# extract, answer, generate
Source = Annotated[
    str, Argument(help="YAML of the run, or the data itself (.jsonl, .csv, .parquet, .pdf, ...)")
]
Schema = Annotated[
    str | None,
    Option("--schema", help="'Brand, Color', JSON Schema, module:Class, YAML of categories"),
]
Method = Annotated[str | None, Option("--method", help="decoding.method")]
Model = Annotated[str | None, Option("--model", "-m", help="model.name")]
Output = Annotated[str | None, Option("--output", "-o", help="output.path")]
OpenAI = Annotated[
    bool,
    Option("--openai", help="A batch file of OpenAI's API; writes output.jsonl and errors.jsonl"),
]
RetryErrors = Annotated[
    bool, Option("--retry-errors", help="Try the failed documents of a run again, no others")
]
AllErrors = Annotated[
    bool, Option("--all-errors", help="The same, also for what cannot be read in the input")
]

# ------------------------------------------------------------------------
# evaluate
Labels = Annotated[
    str,
    Argument(
        help="Ids and values (.csv, .xlsx), or JSON lines of {id, target | questions | reference}"
    ),
]
Against = Annotated[
    str | None, Option(metavar="RUN", help="Also the difference to this run, document by document")
]
LabelsColumn = Annotated[
    str, Option(help="What holds the labelled values, as training.labels_column")
]
Tolerance = Annotated[
    float, Option(min=0, help="Share by which a number may differ from a label that is one")
]
CalibrationTo = Annotated[
    str | None, Option("--output", "-o", help="Where it goes; none: beside adapter or weights")
]

# ------------------------------------------------------------------------
# verify, errors, export
ExportTo = Annotated[
    str, Argument(metavar="FILE", help="A local file that ends in .csv, .jsonl or .parquet")
]
Threads = Annotated[int, Option(min=1, help="Units that are compared at the same time")]

# ------------------------------------------------------------------------
# estimate, tune
Sample = Annotated[
    int, Option(min=2, help="Documents that are decoded to measure; tune: by every setting")
]
Minutes = Annotated[float | None, Option(help="Most time for measuring")]
Baseline = Annotated[
    bool, Option("--baseline/--no-baseline", help="Also decode the sample autoregressively")
]
Throughput = Annotated[
    list[str] | None, Option(metavar="[GPU=]RATE", help="Documents/s of a GPU, if not measured")
]
BaselineThroughput = Annotated[
    list[str] | None, Option(metavar="[GPU=]RATE", help="That of autoregressive decoding")
]
PredictedModel = Annotated[
    str | None, Option("--model", help="Predict the speed of a model that nobody has measured")
]
PredictedTokens = Annotated[
    tuple[float, float, float, float, float],
    Option(
        "--tokens", metavar="SHARED OWN KEYS VALUES PASSES", help="Of a document that is predicted"
    ),
]
TunedTo = Annotated[
    str | None, Option("--output", "-o", help="Where it goes; none: CONFIG.tuned.yaml beside it")
]
CascadeLabels = Annotated[
    str | None,
    Option(
        "--cascade",
        metavar="LABELS",
        help="Labelled documents: finds cascade.under, and no other setting",
    ),
]
F1Floor = Annotated[
    float | None, Option(help="F1 that the cascade has to hold, surely (97.5%); none: fit.f1_floor")
]
Judge = Annotated[
    Literal["low", "share"],
    Option(
        help="What must reach it: the low end of the share's 95% interval, or the share as it is"
    ),
]
Reference = Annotated[
    Literal["auto", "document", "guided"],
    Option(
        help="What answers are compared with: those that the model writes by itself (document), or "
        "with the keys "
        "given and the values in turn (guided); auto: by itself, unless too much "
        "of it is broken"
    ),
]
OfCategory = Annotated[
    str | None, Option("--category", help="Of the documents; what they are called, if of none")
]

# ------------------------------------------------------------------------
# report, status
PageTo = Annotated[
    str | None, Option("--output", "-o", help="Where to write it; none: into the run")
]
Texts = Annotated[
    bool,
    Option("--texts", help="Also texts of the input, which the page then holds, values marked"),
]
Watch = Annotated[bool, Option("--watch", "-w", help="Look again until the run has ended")]
Every = Annotated[float, Option(min=0.5, help="Seconds between two looks")]

# ------------------------------------------------------------------------
# config, model, prices
Shown = Annotated[str | None, Argument(help="YAML of a run, or a section; none: all defaults")]
BaseModel = Annotated[str, Argument(help="Hub id, folder, or smollm2-135m-instruct")]
NewModel = Annotated[str, Argument(help="New folder for the model with the tokens")]
NewHeads = Annotated[str, Argument(help="New folder for the heads: decoding.heads")]
ForMethods = Annotated[
    list[str], Option("--for", help="apar, pasta or space; may be given more than once")
]
Seed = Annotated[int, Option(help="Draws the embedding of space's [Mask]")]
Heads = Annotated[int, Option(min=1, help="Heads: each drafts one token more behind the next one")]
Layers = Annotated[int, Option(min=0, help="Layers (residual blocks) of a head, below its output")]
Regions = Annotated[
    list[str] | None, Option("--region", help="AWS region; may be given more than once")
]
Region = Annotated[str, Option(help="AWS region")]
InstanceType = Annotated[str | None, Argument(help="Such as g6e.48xlarge; none: all")]
