"""Arguments and options of the commands: names, limits and help.

Options that several commands share are here, and those that are longer than a line. The commands
contain the defaults.
"""

from typing import Annotated, Literal

from typer import Argument, Option

# ------------------------------------------------------------------------
# of most commands
Config = Annotated[str, Argument(help="YAML of the run; `raypd config show` lists all keys")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="Configuration keys to set")
]
Run = Annotated[str, Argument(metavar="RUN", help="Folder of a run (its output.path)")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Also print the messages of Ray")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of text")]

# ------------------------------------------------------------------------
# quickstart, init
QuickstartTo = Annotated[str, Argument(metavar="DIR", help="New folder to write into")]
Sampled = Annotated[
    str,
    Argument(
        help="The data: a file (.jsonl, .csv, .xlsx, .parquet, .pdf, ...), a folder or a glob"
    ),
]
ConfigTo = Annotated[
    str | None,
    Option("--output", "-o", help="YAML file to write; default: NAME.yaml in this folder"),
]

Target = Annotated[
    Literal["laptop", "gpu", "api", "toy"] | None,
    Option(
        "--for",
        help="Model to write: one that fits the memory (laptop) or the GPU (gpu) of this machine, "
        "a server (api), or the embedded model (toy)",
    ),
]

# ------------------------------------------------------------------------
# extract, answer, generate
Source = Annotated[
    str, Argument(help="YAML of the run, or the data itself (.jsonl, .csv, .parquet, .pdf, ...)")
]
Schema = Annotated[
    str | None,
    Option(
        "--schema",
        help="What to extract: 'Brand, Color', a YAML of attributes or categories, a JSON Schema, "
        "or a pydantic model (module:Class)",
    ),
]
Questions = Annotated[
    str | None,
    Option(
        "--questions",
        metavar="FILE",
        help="Questions that are asked about every context: one per line, or CSV",
    ),
]
Method = Annotated[str | None, Option("--method", help="Decoding method (decoding.method)")]
Model = Annotated[str | None, Option("--model", "-m", help="Model (model.name)")]
Output = Annotated[str | None, Option("--output", "-o", help="Folder of the run (output.path)")]
OpenAI = Annotated[
    bool,
    Option(
        "--openai", help="Read a batch file of OpenAI's API, write output.jsonl and errors.jsonl"
    ),
]
RetryErrors = Annotated[
    bool, Option("--retry-errors", help="Retry only the failed documents of a run")
]
AllErrors = Annotated[
    bool,
    Option("--all-errors", help="--retry-errors, and also documents that could not be read"),
]

# ------------------------------------------------------------------------
# evaluate
Labels = Annotated[
    str,
    Argument(
        help="File of labels: ids and values (.csv, .tsv, .xlsx, .parquet), or JSON Lines of "
        "{id, target | questions | reference}"
    ),
]
Against = Annotated[
    str | None, Option(metavar="RUN", help="Another run to compare with, document by document")
]
LabelsColumn = Annotated[str, Option(help="Column with the labels, like training.labels_column")]
Tolerance = Annotated[
    float, Option(min=0, help="Maximum relative difference between a number and its label")
]
CalibrationTo = Annotated[
    str | None,
    Option("--output", "-o", help="File to write; default: next to the adapter or weights"),
]

# ------------------------------------------------------------------------
# verify, errors, export
ExportTo = Annotated[
    str, Argument(metavar="FILE", help="Local file to write; ends in .csv, .jsonl or .parquet")
]
Threads = Annotated[int, Option(min=1, help="Units to compare at the same time")]

# ------------------------------------------------------------------------
# estimate, tune
Sample = Annotated[
    int,
    Option(
        min=2, help="Documents to decode for a measurement; `tune` decodes them with every setting"
    ),
]
Minutes = Annotated[
    float | None,
    Option(help="Time limit of the measurement in minutes; default: no limit"),
]
Baseline = Annotated[
    bool, Option("--baseline/--no-baseline", help="Also measure autoregressive decoding")
]
Throughput = Annotated[
    list[str] | None,
    Option(metavar="[GPU=]RATE", help="Documents/s of a GPU, instead of measuring"),
]
BaselineThroughput = Annotated[
    list[str] | None, Option(metavar="[GPU=]RATE", help="Documents/s of autoregressive decoding")
]
PredictedModel = Annotated[
    str | None, Option("--model", help="Predict the speed of a model without measuring it")
]
PredictedTokens = Annotated[
    tuple[float, float, float, float, float] | None,
    Option(
        "--tokens",
        metavar="SHARED OWN KEYS VALUES PASSES",
        help="Tokens of a document that the prediction assumes; default: those of the "
        "configuration, or 400 300 80 80 5",
    ),
]
TunedTo = Annotated[
    str | None, Option("--output", "-o", help="YAML file to write; default: CONFIG.tuned.yaml")
]
CascadeLabels = Annotated[
    str | None,
    Option(
        "--cascade",
        metavar="LABELS",
        help="File of labelled documents: find cascade.under, and tune nothing else",
    ),
]
F1Floor = Annotated[
    float | None,
    Option(help="F1 that the cascade must reach with 97.5% confidence; default: fit.f1_floor"),
]
Judge = Annotated[
    Literal["low", "share"],
    Option(
        help="What must reach --agreement: the low end of its 95% interval, or the share itself"
    ),
]
Reference = Annotated[
    Literal["auto", "document", "guided"],
    Option(
        help="Answers to compare with. document: the model writes freely; guided: the keys are "
        "given, and values are decoded one after the other; auto: document, unless too many of its "
        "answers are broken"
    ),
]
OfCategory = Annotated[
    str | None, Option("--category", help="Category of the documents, or a name for it")
]

# ------------------------------------------------------------------------
# report, status
PageTo = Annotated[
    str | None, Option("--output", "-o", help="File to write; default: in the run's folder")
]
Texts = Annotated[
    bool,
    Option("--texts", help="Include texts of the input, with their values marked"),
]
Watch = Annotated[bool, Option("--watch", "-w", help="Repeat until the run has ended")]
Every = Annotated[float, Option(min=0.5, help="Seconds between repetitions")]

# ------------------------------------------------------------------------
# config, model, prices
Shown = Annotated[
    str | None,
    Argument(help="YAML of a run, a section, or a key such as cluster.unit_bytes; default: all"),
]
BaseModel = Annotated[
    str, Argument(help="Base model: a Hub id, a folder, or smollm2-135m-instruct")
]
NewModel = Annotated[str, Argument(help="New folder for the model with the tokens")]
NewHeads = Annotated[str, Argument(help="New folder for the heads (decoding.options.heads)")]
ForMethods = Annotated[
    list[str], Option("--for", help="Method: apar, pasta or space; may be given more than once")
]
Seed = Annotated[int, Option(help="Seed of the embedding of space's [Mask]")]
Heads = Annotated[int, Option(min=1, help="Number of heads; each drafts one more token")]
Layers = Annotated[int, Option(min=0, help="Layers (residual blocks) of a head")]
Regions = Annotated[
    list[str] | None, Option("--region", help="AWS region; may be given more than once")
]
Region = Annotated[str, Option(help="AWS region")]
InstanceType = Annotated[
    str | None, Argument(help="Instance type, such as g6e.48xlarge; default: all")
]
