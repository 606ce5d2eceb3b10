"""Youtu-VL's cases. The first one is the default: its dump is committed."""

from references.cases import Case, crop, page, scaled

DESCRIBE = "Describe the image briefly."
LONG = " ".join(
    f"Item {number}: the {colour} box on shelf {number % 9} holds {number * 37 % 101} parts, "
    f"checked on day {number % 28 + 1}."
    for number, colour in zip(range(1, 33), ["red", "green", "blue", "yellow"] * 8, strict=True)
)

CASES = (
    Case(
        "square",
        DESCRIBE,
        (crop("china.jpg", 150, 40, 352, 352),),
        about="352x352, grid 22x22, partial windows",
    ),
    Case("banner", DESCRIBE, (scaled("china.jpg", 1468, 220),), about="1468x220, grid 14x92, 322 image tokens"),
    Case("upright", "What is in the picture?", (scaled("flower.jpg", 500, 330),), about="330x500, grid 22x32"),
    Case(
        "smallest",
        "What colours do you see?",
        (crop("flower.jpg", 300, 180, 32, 32),),
        about="32x32, one window",
    ),
    Case("tall", DESCRIBE, (scaled("china.jpg", 100, 1500),), about="100x1500, grid 94x8"),
    Case(
        "photo",
        "这张图片里有什么？",
        (crop("flower.jpg", 0, 0, 640, 427),),
        about="a photograph without text",
    ),
    Case("screen", "Read the text in the image.", (page(480, 320),), about="a page of drawn text"),
    Case(
        "two_images",
        "Compare the two images.",
        (crop("china.jpg", 0, 0, 224, 160), crop("flower.jpg", 200, 100, 96, 320)),
    ),
    Case("text_only", "Write one sentence about numbers."),
    Case("empty", ""),
    Case("one_character", "?"),
    Case("long", LONG, about="over 600 tokens"),
    Case("unicode", "请用中文描述👩‍👩‍👧 和 🚀，一共 12345 个字！“你好”——再见…"),
)

# For the true widths, the first one by itself: the picture of the published port's own test. A greedy step reads all
# 10.7 GB of weights, so it has few.
WIDE_CASES = (
    Case(
        "seed",
        DESCRIBE,
        (scaled("china.jpg", 1468, 220),),
        new_tokens=4,
        about="1468x220, 1,288 patches, 322 image tokens; the port's own tokenizer made 348 tokens of its prompt",
    ),
)
