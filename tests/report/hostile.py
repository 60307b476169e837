"""Text that documents may hold to take over a page that shows it, or to break it."""

MARK = "pwned"
TEXTS = [
    f"<script>window.{MARK}=1</script>",
    f"</script><script>window.{MARK}=2</script>",
    f'"><img src=x onerror="window.{MARK}=3">',
    f"' autofocus onfocus='window.{MARK}=4",
    f"<svg onload=window.{MARK}=5><animate onbegin=window.{MARK}=6 attributeName=x dur=1s>",
    f"</title></style></textarea></option></select><body onload=window.{MARK}=7>",
    f'<a href="javascript:window.{MARK}=8">click</a>',
    f"<iframe srcdoc='<script>parent.{MARK}=9</script>'></iframe>",
    "<link rel=stylesheet href=http://127.0.0.1:9/x.css><img src=http://127.0.0.1:9/x.png>",
    "<style>@import url(http://127.0.0.1:9/y.css); * { display: none }</style>",
    '<meta http-equiv="refresh" content="0;url=http://127.0.0.1:9/">',
    "<base href=http://127.0.0.1:9/><form action=http://127.0.0.1:9/><button>",
    "{{ 7 * 7 }} {% raise %} ${7*7} $x_1$ $\\frac{",
    "]]> <!-- --> <![CDATA[",
    "\u202eevil\u202d right to left \u2066x\u2069",
    "NUL \0 bell \a escape \x1b[31m red",
    "line\u2028separator\u2029end",
    "\ufeff\u200e\u061c",
    "w" * 50_000,
    "ﷺ" * 2_000,
    "Z" + "\u0301" * 3_000,
    "漢字 عربى עברית 👩‍👩‍👧‍👦 ð",
]
