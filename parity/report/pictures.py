"""Pictures of the report: the case's own, and where the port's preprocessor differs, as data URIs."""

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from parity.report.parts import Content, pipeline
from parity.report.rows import number
from parity.workspace import Workspace
from runtime.image import MERGE

PICTURE = 320  # longest side of a picture in the page, pixels


def has_pictures(workspace: Workspace) -> bool:
    """Whether any case of a workspace has one."""
    return any(case.pictures for case in workspace.cases.values())


def compared_picture(workspace: Workspace) -> Content:
    """How far the port's preprocessor is off in the first picture."""
    case, actual, expected, _ = _first_picture(workspace)
    about = {"model": workspace.model, "case": case}
    if actual.shape != expected.shape:
        return about | {"problem": f"patch rows are {actual.shape}, but should be {expected.shape}"}
    return about | {
        "total": actual.size,
        "differing": int(np.count_nonzero(actual != expected)),
        "max_abs": number(float(np.abs(actual - expected).max())),
    }


def _first_picture(workspace: Workspace) -> tuple[str, NDArray[np.float32], NDArray[np.float32], tuple[int, int]]:
    """The first case with a picture: its name, port's and reference's patch rows (N, C) of the picture, the grid."""
    case = next(case for case in workspace.cases.values() if case.pictures)
    pixels = pipeline(workspace).preprocess(case.images()[:1])[0]
    dump = workspace.dump(case.name)
    height, width = dump.values["grids"][0]
    expected: NDArray[np.float32] = dump.tensors["pixel_values"][: height * width]
    return case.name, pixels.pixel_values, expected, (height, width)


def drawn(content: Content, workspaces: Sequence[Workspace]) -> list[Content]:
    """Per model with a picture: `picture` and `difference` as data URIs, "" where they could not be made."""
    pictured = [workspace for workspace in workspaces if has_pictures(workspace)]
    return [
        about | (_drawn(workspace) if "problem" not in about else {"picture": "", "difference": ""})
        for about, workspace in zip(content["pictures"], pictured, strict=True)
    ]


def _drawn(workspace: Workspace) -> Content:
    name, actual, expected, grid = _first_picture(workspace)
    picture = Image.fromarray(workspace.cases[name].images()[0])
    return {"picture": _data_uri(picture), "difference": _data_uri(difference_image(actual, expected, grid))}


def difference_image(actual: NDArray[np.float32], expected: NDArray[np.float32], grid: tuple[int, int]) -> Image.Image:
    """Patch rows (N, C) of both sides -> an RGB picture, black where they are equal, else from grey to white."""
    difference = np.abs(unpatchify(actual, grid) - unpatchify(expected, grid))  # (H, W, 3)
    largest = float(difference.max()) or 1.0
    shown = np.where(difference > 0, 96 + 159 * (difference / largest), 0)
    return Image.fromarray(shown.astype(np.uint8))


def unpatchify(rows: NDArray[np.float32], grid: tuple[int, int]) -> NDArray[np.float32]:
    """Rows in merge-block order (N, patch * patch * 3) -> pixels (H, W, 3): the inverse of runtime.image.patchify."""
    height, width = grid
    patch = math.isqrt(rows.shape[1] // 3)
    blocks = rows.reshape(height // MERGE, width // MERGE, MERGE, MERGE, patch, patch, 3)
    return blocks.transpose(0, 2, 4, 1, 3, 5, 6).reshape(height * patch, width * patch, 3)  # (H, W, 3)


def _data_uri(image: Image.Image) -> str:
    image = image.copy()
    image.thumbnail((PICTURE, PICTURE), Image.Resampling.BOX)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
