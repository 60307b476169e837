"""Arguments and options of the commands: names, limits and help.

Options that several commands share are here, and those that are longer than a line. The commands
contain the defaults.
"""

from typing import Annotated, Literal

from typer import Argument, Option

# ------------------------------------------------------------------------
# of most commands
Config = Annotated[str, Argument(help="YAML of the run; `raypd config show` lists all keys")]
Overrides = Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Keys to set, dotted")]
Run = Annotated[str, Argument(metavar="RUN", help="Folder of a run (its output.path)")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Also print the messages of Ray")]
AsJson = Annotated[bool, Option("--json", help="Print JSON")]

# ------------------------------------------------------------------------
# quickstart, init
QuickstartTo = Annotated[str, Argument(metavar="DIR", help="A new folder")]
Sampled = Annotated[
    str,
    Argument(help="The data: .jsonl, .csv, .xlsx, .parquet, .txt, .pdf, .docx; a folder, a glob"),
]
ConfigTo = Annotated[
    str | None, Option("--output", "-o", help="The YAML to write; default: NAME.yaml here")
]

Target = Annotated[
    Literal["laptop", "gpu", "api", "toy"] | None,
    Option("--for", help="The model: by free memory, by GPU memory, a server, or the embedded toy"),
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
Questions = Annotated[
    str | None,
    Option("--questions", metavar="FILE", help="The questions of every context: a line each, CSV"),
]
Method = Annotated[str | None, Option("--method", help="decoding.method")]
Model = Annotated[str | None, Option("--model", "-m", help="model.name")]
Output = Annotated[str | None, Option("--output", "-o", help="output.path")]
OpenAI = Annotated[
    bool,
    Option("--openai", help="A batch file of OpenAI's API; writes output.jsonl and errors.jsonl"),
]
RetryErrors = Annotated[
    bool, Option("--retry-errors", help="Retry the failed documents of a run, and no others")
]
AllErrors = Annotated[
    bool, Option("--all-errors", help="The same, and also documents that could not be read")
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
    str | None, Option(metavar="RUN", help="Also compare with this run, document by document")
]
LabelsColumn = Annotated[
    str, Option(help="The column with the labelled values, as training.labels_column")
]
Tolerance = Annotated[
    float, Option(min=0, help="Share by which a number may differ from its label")
]
CalibrationTo = Annotated[
    str | None, Option("--output", "-o", help="A file; default: next to the adapter or weights")
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
    int, Option(min=2, help="Documents to decode for a measurement; tune: with every setting")
]
Minutes = Annotated[float | None, Option(help="Limit of the time for measuring")]
Baseline = Annotated[
    bool, Option("--baseline/--no-baseline", help="Also decode the sample autoregressively")
]
Throughput = Annotated[
    list[str] | None,
    Option(metavar="[GPU=]RATE", help="Documents/s of a GPU, instead of measuring"),
]
BaselineThroughput = Annotated[
    list[str] | None, Option(metavar="[GPU=]RATE", help="The same for autoregressive decoding")
]
PredictedModel = Annotated[
    str | None, Option("--model", help="Predict the speed of a model without measuring it")
]
PredictedTokens = Annotated[
    tuple[float, float, float, float, float] | None,
    Option(
        "--tokens",
        metavar="SHARED OWN KEYS VALUES PASSES",
        help="Of a document, to predict it; default: those of the configuration, or 400 300 80 80 "
        "5",
    ),
]
TunedTo = Annotated[
    str | None, Option("--output", "-o", help="The YAML to write; default: CONFIG.tuned.yaml")
]
CascadeLabels = Annotated[
    str | None,
    Option(
        "--cascade",
        metavar="LABELS",
        help="Labelled documents: find cascade.under, and no other setting",
    ),
]
F1Floor = Annotated[
    float | None,
    Option(help="F1 that the cascade must hold with 97.5% confidence; default: fit.f1_floor"),
]
Judge = Annotated[
    Literal["low", "share"],
    Option(help="What must reach it: the low end of the share's 95% interval, or the share itself"),
]
Reference = Annotated[
    Literal["auto", "document", "guided"],
    Option(
        help="What answers are compared with: those that the model writes freely (document), or "
        "with the keys given and one value after the other (guided); auto: freely, unless too many "
        "of these are broken"
    ),
]
OfCategory = Annotated[
    str | None, Option("--category", help="The documents' category, or a name for it")
]

# ------------------------------------------------------------------------
# report, status
PageTo = Annotated[
    str | None, Option("--output", "-o", help="A file; default: into the run's folder")
]
Texts = Annotated[
    bool,
    Option("--texts", help="Include texts of the input, with marked values"),
]
Watch = Annotated[bool, Option("--watch", "-w", help="Repeat until the run has ended")]
Every = Annotated[float, Option(min=0.5, help="Seconds between repetitions")]

# ------------------------------------------------------------------------
# config, model, prices
Shown = Annotated[str | None, Argument(help="YAML of a run, or a section; default: all sections")]
BaseModel = Annotated[str, Argument(help="Hub id, folder, or smollm2-135m-instruct")]
NewModel = Annotated[str, Argument(help="New folder for the model with the tokens")]
NewHeads = Annotated[str, Argument(help="New folder for the heads: decoding.options.heads")]
ForMethods = Annotated[
    list[str], Option("--for", help="apar, pasta or space; may be given more than once")
]
Seed = Annotated[int, Option(help="Seed of the embedding of space's [Mask]")]
Heads = Annotated[int, Option(min=1, help="Heads: each drafts one token more after the next token")]
Layers = Annotated[int, Option(min=0, help="Layers (residual blocks) of a head, below its output")]
Regions = Annotated[
    list[str] | None, Option("--region", help="AWS region; may be given more than once")
]
Region = Annotated[str, Option(help="AWS region")]
InstanceType = Annotated[str | None, Argument(help="Such as g6e.48xlarge; default: all")]
