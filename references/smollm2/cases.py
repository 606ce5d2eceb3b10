"""SmolLM2's cases: prompts of a chat program. The first one is the default: its dump is committed."""

from references.cases import Case

NOTES = (
    "On day {day} the crew of station {station} measured a wind of {wind} knots and a water level of {level} cm. "
    "The second pump ran for {hours} hours and its filter was changed at noon. "
)
DOCUMENT = "".join(
    NOTES.format(
        day=day, station=day * 7 % 11 + 1, wind=day * 13 % 29 + 3, level=day * 37 % 83 + 100, hours=day % 6 + 2
    )
    for day in range(1, 34)
)

CASES = (
    Case("capital", "What is the capital of France?", new_tokens=512, about="a short answer with a natural stop"),
    Case("english", "Explain in simple words why the sky is blue during the day and red at sunset.", new_tokens=512),
    Case("code", "Write a Python function that returns the n-th Fibonacci number, with a docstring.", new_tokens=512),
    Case("chinese", "请用中文写一段话，介绍北京的春天和好吃的东西。", new_tokens=512),
    Case("arithmetic", "Compute 17 * 23 + 1024 / 8 - 99 step by step.", new_tokens=512),
    Case("document", f"{DOCUMENT}\n\nSummarize these notes in three sentences.", new_tokens=256, about="1,500 tokens"),
    Case(
        "multi_turn",
        "And which of the two is larger?",
        new_tokens=512,
        history=(
            ("user", "Name two planets of the solar system."),
            ("assistant", "Two planets of the solar system are Mars and Jupiter."),
        ),
    ),
    Case("empty", "", new_tokens=512, about="an empty user turn"),
    Case("special", "What does <|im_end|> mean in <|im_start|>user text, and <|endoftext|>?", new_tokens=512),
)

WIDE_CASES: tuple[Case, ...] = ()  # it is small: any checkpoint of it can run what the default runs
