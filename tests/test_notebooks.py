"""The course's notebooks: built from their chapters to the byte, and run as on a learner's first day."""

import json
import re
import shutil
import subprocess
import sys
import zlib
from base64 import b85decode, b85encode
from pathlib import Path

import learner
import psutil
import pytest
import verify_curriculum

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "scripts" / "build_notebooks.py"
VERIFY = ROOT / "scripts" / "verify_curriculum.py"
NOTEBOOKS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("book/*/*.ipynb"))

HEAD = "---\ncourse:\n  work: ch99\n{}---\n\n"
CHAPTER = """\
# A chapter

By [this](../../docs/why/a.md#so), and [below](#below).

<!-- setup -->

![A figure](figures/a.svg)

<!-- include: parts/first.md -->

```python tags=["student"]
print("EXERCISE_REPORT={}")
print('COURSE_REPORT={"status": "NEEDS_WORK"}')
```

```python tags=["instructor"]
print("EXERCISE_REPORT={}")
print('COURSE_REPORT={"status": "PASS"}')
```

```text expected
...
COURSE_REPORT={... "PASS"}
```
"""
ALONE = """
```python
import os

print(os.listdir(), os.environ.get("OPENAI_API_KEY"))
```

```text expected
['practical-work'] None
```
"""
FIRST = """\
## Below

```python
import sovereign_agent.room
print(sovereign_agent.room.greeting(), Path(sovereign_agent.room.__file__).is_relative_to(COURSE_ROOT))
```

```text expected
Good morning ...
```

```sql .noeval
SELECT 1
```
"""
ROOM = """\
from pathlib import Path

import tomlkit


def greeting():
    return tomlkit.parse(Path(__file__).with_name("words.toml").read_text())["hello"]


def simulate():
    from sovereign_agent.testing import kit
"""


def put(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def book(tmp_path):
    put(tmp_path, "src/reference_organizations/__init__.py", "")
    put(tmp_path, "src/sovereign_agent/__init__.py", "")
    put(tmp_path, "src/sovereign_agent/room.py", ROOM)
    put(tmp_path, "src/sovereign_agent/words.toml", 'hello = "Good morning"\n')
    put(tmp_path, "src/sovereign_agent/another.py", "")
    put(tmp_path, "src/sovereign_agent/testing/__init__.py", "")
    put(tmp_path, "src/sovereign_agent/testing/kit.py", "")
    put(tmp_path, "pyproject.toml", '[project]\ndependencies = ["psutil>=6.0", "tomlkit>=0.13"]\n')
    put(tmp_path, "constraints.txt", "psutil==7.2.2 \\\n    --hash=x\ntomlkit==0.15.2 \\\n    --hash=y\n")
    put(tmp_path, "book/ch99/figures/a.svg", '<svg xmlns="http://www.w3.org/2000/svg"></svg>\n')
    put(tmp_path, "book/ch99/parts/first.md", FIRST)
    put(tmp_path, "book/ch99/unit.md", HEAD.format("  editions: [student, instructor]\n") + CHAPTER)
    put(tmp_path, "book/README.md", "No source.\n")
    return tmp_path


def run(script, root, *arguments):
    command = [sys.executable, str(script), *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def build(root, *arguments):
    done = run(BUILD, root, *arguments)
    assert done.stderr == ""
    return done.returncode, done.stdout


def built(root, name="unit_student"):
    assert build(root)[0] == 0
    return root / f"book/ch99/{name}.ipynb"


def cells(path):
    return json.loads(path.read_text())["cells"]


def sources(path):
    return ["".join(cell["source"]) for cell in cells(path)]


def setup_cell(path):
    return next("".join(cell["source"]) for cell in cells(path) if "setup" in cell["metadata"].get("tags", []))


# -- from a chapter to its notebooks


def test_the_same_tree_gives_the_same_bytes_anywhere(book, tmp_path_factory):
    paths = [built(book, name) for name in ("unit_student", "unit_instructor")]
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "tree"
    shutil.copytree(book, elsewhere, ignore=shutil.ignore_patterns("*.ipynb"))
    build(elsewhere)
    for path in paths:
        assert (elsewhere / path.relative_to(book)).read_bytes() == path.read_bytes()
        assert len({cell["id"] for cell in cells(path)}) == len(cells(path))
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells(path))
    assert build(book, "--check") == (0, "notebooks: 2 are what their sources give\n")


def test_each_edition_has_its_own_cells_and_what_is_expected_of_them(book):
    student, instructor = (sources(built(book, f"unit_{edition}")) for edition in ("student", "instructor"))
    assert [text for text in student if text not in instructor] == [
        'print("EXERCISE_REPORT={}")\nprint(\'COURSE_REPORT={"status": "NEEDS_WORK"}\')'
    ]
    assert [text for text in instructor if text not in student] == [
        'print("EXERCISE_REPORT={}")\nprint(\'COURSE_REPORT={"status": "PASS"}\')',
        '**What you should see**\n\n```text\n...\nCOURSE_REPORT={... "PASS"}\n```',
    ]


def test_what_only_the_repository_has_is_named_or_brought_along(book):
    path = built(book)
    assert "# A chapter\n\nBy this (`docs/why/a.md`), and below." in sources(path)
    figure = next(text for text in sources(path) if "display(" in text)
    assert 'filename=COURSE_ROOT / "book/ch99/figures/a.svg"' in figure
    assert '"book/ch99/figures/a.svg"' in setup_cell(path)


def test_the_set_up_cell_holds_what_is_imported_and_what_that_names_beside_itself(book):
    put(book, "book/always_on/exercises/harness.py", '"""Theirs."""\n')
    put(book, "book/ch99/unit.md", HEAD.format("  files: [tests/*.py]\n") + CHAPTER)
    put(book, "tests/worker.py", "import psutil\n")
    cell = setup_cell(built(book, "notebook"))
    assert sorted(re.findall(r'^    "([^"]+)": "', cell, re.MULTILINE)) == [
        "book/always_on/exercises/harness.py",
        "book/ch99/figures/a.svg",
        "src/sovereign_agent/__init__.py",
        "src/sovereign_agent/room.py",
        "src/sovereign_agent/words.toml",
        "tests/worker.py",
    ]
    assert 'REQUIRED = {"psutil": ["6.0", "7.2.2"], "tomlkit": ["0.13", "0.15.2"]}' in cell


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```bash\nls\n```\n", "unit.md:7: Jupyter would run"),
        ("<!-- include: parts/nothing.md -->\n", "unit.md:6: includes parts/nothing.md"),
        ("words\n\n```text expected\n7\n```\n", "unit.md:8: an expectation stands right after"),
        ("<!-- include: parts/broken.md -->\n", "parts/broken.md:4: Jupyter would run"),
        ("<!-- setup -->\n\n```python\n%pip list\nif\n```\n", "unit.md:9: its line 2 is no Python"),
    ],
)
def test_a_source_that_gives_no_notebook_is_told_where_and_why(book, text, told):
    put(book, "book/ch99/parts/broken.md", "One\n\n```sql\nSELECT 1\n```\n")
    put(book, "book/ch99/unit.md", HEAD.format("") + text)
    code, printed = build(book)
    assert code == 1
    assert told in printed


@pytest.mark.parametrize(
    ("head", "told"),
    [("  files: [tests/*.txt]\n", "tests/*.txt, which does not exist"), ("  x: [\n", "the front matter is no YAML")],
)
def test_a_front_matter_that_says_nothing_sensible_is_told(book, head, told):
    put(book, "book/ch99/unit.md", HEAD.format(head) + "<!-- setup -->\n")
    code, printed = build(book)
    assert code == 1
    assert told in printed


# -- what is committed


def edited(path, change):
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda notebook: notebook["cells"][4].update(source="print(8)"),
            "cell 5 is not what book/ch99/parts/first.md:4",
        ),
        (lambda notebook: notebook["cells"].pop(), "cell 8 is not what book/ch99/unit.md:18 gives"),
        (lambda notebook: notebook["cells"].append(notebook["cells"][0] | {"id": "x"}), "cell 9"),
        (lambda notebook: notebook["metadata"].update(by="hand"), "has outputs or metadata"),
        (lambda notebook: notebook.pop("cells"), "is no notebook"),
    ],
    ids=["a-cell", "one-less", "one-more", "metadata", "no-notebook"],
)
def test_a_notebook_that_was_changed_by_hand_is_told(book, change, told):
    path = built(book)
    edited(path, change)
    code, printed = build(book, "--check")
    assert code == 1
    assert printed.startswith("book/ch99/unit_student.ipynb: ")
    assert told in printed
    assert "make book" in printed
    build(book)
    assert build(book, "--check")[0] == 0


def test_a_notebook_too_few_and_one_too_many_are_told(book):
    path = built(book)
    path.rename(path.with_name("left_over.ipynb"))
    code, printed = build(book, "--check")
    assert code == 1
    assert "unit_student.ipynb: does not exist" in printed
    assert "left_over.ipynb: no chapter gives it" in printed


def test_a_change_of_the_runtime_makes_its_notebooks_stale(book):
    built(book)
    put(book, "src/sovereign_agent/another.py", "import this\n")
    assert build(book, "--check")[0] == 0
    put(book, "src/sovereign_agent/words.toml", 'hello = "Good evening"\n')
    code, printed = build(book, "--check")
    assert code == 1
    assert "src/sovereign_agent/words.toml" in printed


def test_another_release_of_zlib_may_have_packed_it(book):
    def repack(notebook):
        cell = next(cell for cell in notebook["cells"] if "setup" in cell["metadata"].get("tags", []))
        head, packed, tail = "".join(cell["source"]).split('"""')
        stored = zlib.compress(zlib.decompress(b85decode("".join(packed.split()))), 0)
        cell["source"] = f'{head}"""\n{b85encode(stored).decode()}\n"""{tail}'

    path = built(book)
    edited(path, repack)
    packed = path.read_bytes()
    assert build(book, "--check")[0] == 0
    build(book)
    assert path.read_bytes() == packed, "what is the same is not written anew"


# -- the set-up cell


def set_up(path, folder, after="", *, packages=True, cell=None):
    program = f"{cell or setup_cell(path)}\n{after}"
    options = [] if packages else ["-S"]
    return subprocess.run(
        [sys.executable, *options, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_set_up_gives_the_frozen_files_first_and_again_and_keeps_the_work(book, tmp_path):
    path = built(book)
    after = """
import subprocess
room = COURSE_ROOT / "src/sovereign_agent/room.py"
frozen = room.read_bytes()
room.write_text("broken")
(COURSE_WORK / "mine.txt").write_text("kept")
again, kept = COURSE_ROOT, COURSE_WORK
exec(SETUP)
import sovereign_agent.room
assert (COURSE_ROOT, COURSE_WORK, room.read_bytes()) == (again, kept, frozen)
assert sovereign_agent.room.__file__ == str(room)
elsewhere = "import sovereign_agent.room as room; print(room.__file__)"
assert subprocess.check_output([sys.executable, "-c", elsewhere], text=True).strip() == str(room)
assert os.environ["PYTHONPATH"].split(os.pathsep).count(str(COURSE_ROOT / "src")) == 1
assert sys.path.count(str(COURSE_ROOT / "src")) == 1
print(COURSE_ROOT)
"""
    cell = f"import sovereign_agent  # an installed one\nSETUP = {setup_cell(path)!r}\nexec(SETUP)\n"
    done = set_up(path, tmp_path, after, cell=cell)
    assert done.returncode == 0, done.stderr
    *_, told, scratch = done.stdout.splitlines()
    assert told == "Set-up is complete: 4 teaching files were verified; your work is kept in practical-work/ch99"
    assert (tmp_path / "practical-work/ch99/mine.txt").read_text() == "kept"
    assert not Path(scratch).exists(), "the scratch folder goes with its kernel"


def test_set_up_names_the_line_that_installs_what_is_missing(book, tmp_path):
    done = set_up(built(book), tmp_path, packages=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith('restart the kernel, and start again:  %pip install "tomlkit==0.15.2"')
    assert not (tmp_path / "practical-work").exists()


def test_set_up_refuses_an_older_release_and_takes_a_newer_one(book, tmp_path):
    for least, code in (("99", 1), ("0.1", 0)):
        put(book, "pyproject.toml", f'[project]\ndependencies = ["tomlkit>={least}"]\n')
        assert set_up(built(book), tmp_path).returncode == code


def test_set_up_refuses_a_damaged_copy(book, tmp_path):
    path = built(book)
    digest = re.search(r'room.py": "(\w+)"', setup_cell(path))[1]
    done = set_up(path, tmp_path, cell=setup_cell(path).replace(digest, "0" * 64))
    assert done.returncode == 1
    assert "damaged (src/sovereign_agent/room.py): download it again" in done.stderr


# -- a learner's first day

LEAVES = """\
import subprocess
import sys

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)", "a straggler"], start_new_session=True)
"""
TROUBLE = {
    "raises": ("```python\nmissing\n```\n", ["cell 2 (book/ch99/raises.md:9) raised NameError"]),
    "differs": (
        '```python\nprint("a 7\\nb")\n```\n\n```text expected\na ...\nc\n```\n',
        ["cell 2 (book/ch99/differs.md:9) printed something else", "      a ...\n      c\n", "      a 7\n      b\n"],
    ),
    "hangs": ("```python\nwhile True: pass\n```\n", ["cell 2 (book/ch99/hangs.md:9) did not end within 3 seconds"]),
    "dies": ("```python\nimport os\nos._exit(3)\n```\n", ["the kernel died in cell 2 (book/ch99/dies.md:9)"]),
    "leaves": (f"```python\n{LEAVES}```\n", ["left running: ", "a straggler"]),
    "passes_student": (
        '```python\nprint("EXERCISE_REPORT={}")\nprint(\'COURSE_REPORT={"status": "PASS"}\')\n```\n',
        ["and not in the status NEEDS_WORK"],
    ),
    "half_instructor": (
        '```python\nprint(\'COURSE_REPORT={"status": "PASS"}\')\n```\n',
        ["half_instructor.ipynb on Python", "prints no EXERCISE_REPORT= or no COURSE_REPORT="],
    ),
    "silent_instructor": ("```python\nprint(7)\n```\n", ["silent_instructor.ipynb on Python"]),
}


@pytest.mark.timeout(300)
def test_a_notebook_that_does_what_its_chapter_says_passes_and_its_own_runtime_is_what_ran(book, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", str(book / "src"))
    put(book, "book/ch99/parts/first.md", FIRST.replace("Good morning ...", "Good morning True"))
    put(book, "book/ch99/unit.md", HEAD.format("  editions: [student, instructor]\n") + CHAPTER + ALONE)
    done = run(VERIFY, book, "notebooks", "--here")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith("notebooks: 2 ran on Python ")


@pytest.mark.timeout(300)
def test_whatever_a_notebook_does_otherwise_is_told_with_its_place(book):
    (book / "book/ch99/unit.md").unlink()
    straggler = f"a straggler of {book}"
    for name, (cell, _) in TROUBLE.items():
        stem, _, edition = name.partition("_")
        head = HEAD.format(f"  editions: [{edition}]\n" if edition else "")
        put(book, f"book/ch99/{stem}.md", f"{head}# {name}\n\n{cell}".replace("a straggler", straggler))
    done = run(VERIFY, book, "notebooks", "--here", "--cell-seconds", "3")
    assert (done.returncode, done.stderr) == (1, "")
    for name, (_, told) in TROUBLE.items():
        for words in told:
            assert words in done.stdout, name
    assert not any(straggler in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def test_in_ci_a_newer_python_that_is_not_there_is_a_failure_and_elsewhere_it_is_told(book, monkeypatch, capsys):
    absent = "notebooks: no Python from 3.12 on was found: on it nothing ran"
    found, searched = list[str](), [*sys.path]
    monkeypatch.setattr(learner, "environments", lambda *_: [learner.Environment(Path(), each) for each in found])
    monkeypatch.setattr(learner, "attend", lambda *_: [])
    for releases, ci, problems, told in (
        (["3.11.7"], "true", [absent], False),
        (["3.11.7"], "", [], True),
        (["3.11.7", "3.12.1"], "true", [], False),
    ):
        found[:] = releases
        monkeypatch.setenv("CI", ci)
        assert verify_curriculum.verify_notebooks(book, "", 1, here=False) == problems
        assert (absent in capsys.readouterr().out) == told
    assert sys.path == searched  # where this process looks for modules is what its children are told


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "notebook",
    [  # `make curriculum` runs them all, in CI too
        pytest.param(each, marks=() if "unit_b_student" in each else pytest.mark.torture) for each in NOTEBOOKS
    ],
)
def test_the_chapters_run_and_print_what_they_show(notebook):
    done = run(VERIFY, ROOT, "notebooks", "--here", "--only", notebook)
    assert done.returncode == 0, done.stdout + done.stderr
