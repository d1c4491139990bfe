from appliance.checkpoint.streams import Progress
from appliance.progress import in_words, telling


def test_a_line_says_what_is_done_how_far_it_is_and_how_much_is_verified() -> None:
    told: list[str] = []
    telling("loading", told.append)(Progress(34, 66, 12 << 30, 20 << 30))
    assert told == ["loading 34/66 files, 12 GiB verified"]
    assert in_words("pinning", Progress(0, 1, 0, 5)).startswith("pinning 0/1 files")
