"""The map between the category ids of annotation files and the class indices of the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmdet.data.errors import DataError


def is_integer(value) -> bool:
    """Whether a JSON value is an integer (true and false are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Categories:
    """The one map between the category ids of annotation files and the class indices 0..C-1 of the network."""

    ids: tuple[int, ...]  # ascending
    names: tuple[str, ...]

    @classmethod
    def from_coco(cls, categories: list[dict], file: str | Path = "the annotations") -> Categories:
        """From the ``categories`` of a COCO file, whatever their order there.

        Raises:
            DataError: no category, an id or name given twice, or an id that is no integer.
        """
        pairs = []
        for entry in categories:
            if not isinstance(entry, dict) or "name" not in entry or not is_integer(entry.get("id")):
                raise DataError(f"{file}: category {entry!r} needs an integer 'id' and a 'name'")
            pairs.append((int(entry["id"]), str(entry["name"])))
        if not pairs:
            raise DataError(f"{file}: 'categories' is empty; at least one {{'id': 1, 'name': ...}} is needed")
        for what, values in (("id", [i for i, _ in pairs]), ("name", [n for _, n in pairs])):
            twice = sorted({v for v in values if values.count(v) > 1})
            if twice:
                raise DataError(f"{file}: category {what} {', '.join(map(repr, twice))} is given twice; make each one unique")
        pairs.sort()
        return cls(tuple(i for i, _ in pairs), tuple(n for _, n in pairs))

    def __len__(self) -> int:
        return len(self.ids)

    def index_of(self, category_id: int) -> int:
        """Class index in [0, C) of a category id. KeyError if there is none."""
        try:
            return self.ids.index(category_id)
        except ValueError:
            raise KeyError(f"category id {category_id} is none of {self.ids}") from None

    def id_of(self, index: int) -> int:
        """Category id of a class index in [0, C)."""
        return self.ids[index]

    def check_same(self, other: Categories, here: str | Path, there: str | Path) -> None:
        """That every category of ``other`` (file ``there``) is one of these (file ``here``), with the same id and name.

        Raises:
            DataError: names the ids and both names of all that disagree.
        """
        names = dict(zip(self.ids, self.names))
        faults = []
        for i, name in zip(other.ids, other.names):
            if i not in names:
                faults.append(f"id {i} ({name!r}) is not in {here}")
            elif names[i] != name:
                faults.append(f"id {i} is {names[i]!r} in {here} but {name!r} in {there}")
        if faults:
            raise DataError(
                f"the categories of {there} do not agree with those of {here}: {'; '.join(faults)}. "
                "Give each class the same id and name in both files"
            )

    def table(self) -> str:
        """One line per class: index, category id, name."""
        rows = [f"{index:>5}  {i:>11}  {name}" for index, (i, name) in enumerate(zip(self.ids, self.names))]
        return "\n".join(["index  category id  name", *rows])
