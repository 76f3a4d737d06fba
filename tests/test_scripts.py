"""The house rules that scripts/ hold: each is shown a tree that keeps it and trees that break it by one thing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def run(script, root, *arguments):
    command = [sys.executable, str(SCRIPTS / script), "--root", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def write(root, **files):
    """Write files named by their path, with ``__`` for a slash inside ``src/sovereign_agent``."""
    for name, text in files.items():
        put(root, f"src/sovereign_agent/{name.replace('__', '/')}.py", text)


def put(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def passes(script, root, *arguments):
    done = run(script, root, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fails(script, root, *arguments):
    done = run(script, root, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


# -- the source budget


@pytest.fixture
def package(tmp_path):
    put(tmp_path, "src/sovereign_agent/__init__.py", '"""Doc."""\n\n__all__ = ["one", "two"]\n')
    return tmp_path


def figures(output):
    return {line.split("  ")[0].strip(): line.split("/")[0].split()[-1] for line in output.splitlines()}


def test_blank_lines_comments_and_docstrings_cost_nothing(package):
    room = '"""Head.\n\nMore.\n"""\n\n# why\nLIMIT = 3\n"""Its."""\n\n\ndef act():\n    """Act."""\n    return 1\n'
    put(package, "src/sovereign_agent/room.py", room)
    assert figures(passes("verify_source_budget.py", package))["code lines"] == "4"


def test_each_line_of_a_literal_or_a_call_counts_unless_it_is_blank(package):
    room = 'SQL = """\nSELECT 1\n\n  FROM a\n"""\nVALUE = f"""\n{SQL}\n"""\nprint(\n    1,\n    # why\n    2,\n)\n'
    put(package, "src/sovereign_agent/room.py", room)
    assert figures(passes("verify_source_budget.py", package))["code lines"] == str(1 + 4 + 3 + 4)


def test_wings_are_left_out_of_the_totals_but_not_of_the_limit_for_one_file(package):
    put(package, "src/sovereign_agent/testing/kit.py", "a = 1\n" * 400)
    counted = figures(passes("verify_source_budget.py", package))
    assert (counted["modules"], counted["code lines"]) == ("1", "1")
    put(package, "src/sovereign_agent/testing/kit.py", "a = 1\n" * 401)
    assert "testing/kit.py" in fails("verify_source_budget.py", package)


def test_the_fifty_first_module_is_too_many(package):
    for number in range(49):
        put(package, f"src/sovereign_agent/room{number}.py", "a = 1\n")
    passes("verify_source_budget.py", package)
    put(package, "src/sovereign_agent/storage/__init__.py", "a = 1\n")
    assert "OVER" in fails("verify_source_budget.py", package)


def test_a_file_that_only_explains_is_no_module(package):
    put(package, "src/sovereign_agent/storage/__init__.py", '"""What the folder is for."""\n\n# why\n')
    assert figures(passes("verify_source_budget.py", package))["modules"] == "1"
    put(package, "src/sovereign_agent/storage/__init__.py", "a = 1\n")
    assert figures(passes("verify_source_budget.py", package))["modules"] == "2"


def test_one_code_line_more_than_the_budget_is_too_many(package):
    for number in range(22):
        put(package, f"src/sovereign_agent/room{number}.py", "a = 1\n" * (400 if number else 249))
    passes("verify_source_budget.py", package)
    put(package, "src/sovereign_agent/room0.py", "a = 1\n" * 250)
    assert "OVER" in fails("verify_source_budget.py", package)


def test_the_thirty_first_export_is_too_many(package):
    put(package, "src/sovereign_agent/__init__.py", f"__all__ = {[f'name{n}' for n in range(30)]}\n")
    passes("verify_source_budget.py", package)
    put(package, "src/sovereign_agent/__init__.py", f"__all__ = {[f'name{n}' for n in range(31)]}\n")
    assert "root exports" in fails("verify_source_budget.py", package)


def test_exports_that_cannot_be_counted_fail(package):
    put(package, "src/sovereign_agent/__init__.py", "__all__ = sorted(globals())\n")
    assert run("verify_source_budget.py", package).returncode == 1


# -- runtime dependencies

FIVE = ["psutil>=6", "pydantic>=2", "rich", "tomlkit", "typer[all]>=0.1"]


def project(root, dependencies):
    put(root, "pyproject.toml", f"[project]\ndependencies = {dependencies}\n")


def test_the_declared_five_and_imports_that_they_satisfy_pass(tmp_path):
    project(tmp_path, FIVE)
    write(
        tmp_path,
        room="import os.path\nfrom rich.table import Table\nfrom . import other\nimport sovereign_agent.clock\n",
    )
    write(tmp_path, storage__postgres="import psycopg\n", testing__kit="import pytest\n")
    passes("verify_runtime_dependencies.py", tmp_path)


@pytest.mark.parametrize("dependencies", [FIVE[1:], [*FIVE, "requests"]], ids=["one less", "one more"])
def test_another_list_of_dependencies_fails(tmp_path, dependencies):
    project(tmp_path, dependencies)
    assert "psutil" in fails("verify_runtime_dependencies.py", tmp_path) or "requests" in dependencies


@pytest.mark.parametrize("room", ["import numpy\n", "def act():\n    from psycopg.rows import dict_row\n"])
def test_an_import_that_the_core_does_not_install_fails(tmp_path, room):
    project(tmp_path, FIVE)
    write(tmp_path, room=room)
    assert "src/sovereign_agent/room.py" in fails("verify_runtime_dependencies.py", tmp_path)


# -- migrations


@pytest.fixture
def migrations(tmp_path):
    put(tmp_path, "scripts/migrations.sha256", "# names and digests\n")
    put(tmp_path, "src/sovereign_agent/storage/schema/0001_first.sql", "CREATE TABLE a (b TEXT);\n")
    return tmp_path


def test_an_unreleased_migration_may_change_and_says_how_to_record_it(migrations):
    assert "--record" in passes("verify_migrations_frozen.py", migrations)
    put(migrations, "src/sovereign_agent/storage/schema/0001_first.sql", "-- changed\n")
    passes("verify_migrations_frozen.py", migrations)


def test_a_recorded_migration_may_not_change_and_recording_again_does_not_help(migrations):
    passes("verify_migrations_frozen.py", migrations, "--record")
    assert "1 released, all unchanged" in passes("verify_migrations_frozen.py", migrations)
    put(migrations, "src/sovereign_agent/storage/schema/0001_first.sql", "-- changed\n")
    assert "0001_first.sql" in fails("verify_migrations_frozen.py", migrations)
    fails("verify_migrations_frozen.py", migrations, "--record")


def test_a_recorded_migration_may_not_go_away_and_a_new_one_may_come(migrations):
    passes("verify_migrations_frozen.py", migrations, "--record")
    second = put(migrations, "src/sovereign_agent/storage/schema/0002_second.sql", "CREATE TABLE c (d TEXT);\n")
    passes("verify_migrations_frozen.py", migrations, "--record")
    assert "2 released" in passes("verify_migrations_frozen.py", migrations)
    second.unlink()
    assert "is gone" in fails("verify_migrations_frozen.py", migrations)


# -- SQL at home

SCHEMA = """
-- home: permits
CREATE TABLE permits (
    bay TEXT
) <strict>;
-- home: events
CREATE TABLE events (kind TEXT);
"""
ROOM = '''"""UPDATE events SET in a docstring is prose."""


def take(connection, bay):
    """Take it."""
    connection.execute(
        """
        INSERT INTO permits (bay) VALUES (?)
        ON CONFLICT (bay) DO UPDATE SET bay = excluded.bay
        """,
        (bay,),
    )
    connection.execute("UPDATE permits AS p SET bay = ? WHERE bay = (SELECT kind FROM events <for update>)", (bay,))
    connection.execute("DELETE FROM permits WHERE bay = ?", (bay,))
'''


@pytest.fixture
def ledger(tmp_path):
    put(tmp_path, "src/sovereign_agent/storage/schema/0001_first.sql", SCHEMA)
    write(tmp_path, permits=ROOM, events="", database='BEGIN = "BEGIN"\n')
    write(tmp_path, storage__sqlite='import sqlite3\n\nsqlite3.connect("").execute(f"PRAGMA {1}").execute("COMMIT")\n')
    write(tmp_path, testing__kit='LEFT = "SELECT bay FROM permits"\n')
    put(tmp_path, "src/reference_organizations/shop.py", 'ADD = "INSERT INTO stock (sku) VALUES (?)"\n')
    return tmp_path


def test_statements_at_home_pass(ledger):
    assert "2 tables in 2 homes" in passes("verify_sql_homes.py", ledger)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO permits (bay) VALUES (?)",
        "INSERT OR REPLACE INTO permits VALUES (?)",
        "replace into permits values (?)",
        'UPDATE "permits" SET bay = ?',
        "UPDATE public.permits AS p\n SET bay = ?",
        "WITH x AS (SELECT 1) DELETE FROM permits",
        "TRUNCATE permits",
        "MERGE INTO permits USING x",
        "UPDATE nowhere SET bay = ?",
    ],
)
def test_a_change_away_from_home_fails(ledger, statement):
    write(ledger, relay=f"SQL = {statement!r}\n")
    assert "src/sovereign_agent/relay.py:1" in fails("verify_sql_homes.py", ledger)


def test_an_application_may_change_its_own_tables_and_not_ours(ledger):
    put(ledger, "src/reference_organizations/shop.py", 'SQL = "DELETE FROM permits"\n')
    assert "src/reference_organizations/shop.py:1" in fails("verify_sql_homes.py", ledger)


def test_the_kit_may_change_tables_of_its_own_and_no_other_module_may(ledger):
    own = 'SQL = "CREATE TABLE diary (seq INTEGER)"\nADD = "INSERT INTO diary (seq) VALUES (?)"\n'
    write(ledger, testing__kit=own)
    passes("verify_sql_homes.py", ledger)
    write(ledger, relay=own)
    assert "src/sovereign_agent/relay.py:2" in fails("verify_sql_homes.py", ledger)


@pytest.mark.parametrize("module", ["organization", "console__pages"])
def test_a_query_in_a_module_that_is_no_home_fails(ledger, module):
    query = 'SQL = """\nSELECT kind\n  FROM events\n"""\n'
    write(ledger, console__queries=query)
    passes("verify_sql_homes.py", ledger)
    write(ledger, **{module: query})
    assert "no home" in fails("verify_sql_homes.py", ledger)


@pytest.mark.parametrize("place", ["src/sovereign_agent/permits.py", "src/reference_organizations/shop.py"])
@pytest.mark.parametrize(
    "line",
    [
        'c.execute(f"SELECT a FROM {x}")',
        'c.execute("PRAGMA " + x)',
        'c.executemany("a %s" % x)',
        'c.execute("a {}".format(x))',
        'sql = f"UPDATE {x} SET a = 1"',
        'sql = "SELECT a FROM b WHERE " + x',
        'sql = "DELETE FROM %s" % x',
        'sql = "INSERT INTO {} VALUES (?)".format(x)',
        'sql = " ".join(["SELECT a", x])',
        "import sqlite3",
        "from psycopg.rows import dict_row",
        "c.executescript(x)",
        'getattr(c, "executescript")(x)',
        'c.execute("BEGIN IMMEDIATE")',
        'c.execute("commit")',
        'sql = "SELECT 1; ROLLBACK"',
    ],
)
def test_sql_made_at_run_time_drivers_scripts_and_transactions_fail(ledger, place, line):
    put(ledger, place, line + "\n")
    assert f"{place}:1" in fails("verify_sql_homes.py", ledger)


@pytest.mark.parametrize(
    "schema",
    [
        "CREATE TABLE stray (a TEXT);",
        "-- home: nowhere\nCREATE TABLE stray (a TEXT);",
        "-- home: events\n\nCREATE TABLE IF NOT EXISTS stray (a TEXT);",
    ],
    ids=["no home", "no such module", "not over the table"],
)
def test_a_table_without_a_home_fails(ledger, schema):
    put(ledger, "src/sovereign_agent/storage/schema/0002_second.sql", schema)
    assert "stray" in fails("verify_sql_homes.py", ledger)


# -- the curriculum


@pytest.fixture
def curriculum(tmp_path):
    put(tmp_path, "book/ch99/chapter.md", "[Up](../../README.md)\n")
    put(tmp_path, "tests/test_a.py", "def test_b():\n    pass\n")
    put(
        tmp_path,
        "docs/why/a.md",
        "Up to the [front](../../README.md#the-top-is-a-b), or [away](https://example.org).\n",
    )
    put(
        tmp_path,
        "README.md",
        "# The top: is `a-b`?\n## Thrice\n## Thrice\n## Thrice\n[On](#thrice-2)\n"
        "`tests/test_a.py::test_b[x]`, `docs/why/`, `tests/*.py`, `/tmp/x`, `a/b`\n"
        "```\n`docs/in-a-fence.md`\n# no\n```\n",
    )
    return tmp_path


def test_documents_that_point_at_what_exists_pass(curriculum):
    assert "documents: 3 point" in passes("verify_curriculum.py", curriculum, "documents")


@pytest.mark.parametrize(
    "text",
    [
        "`docs/nowhere.md`",
        "`tests/test_a.py::test_c`",
        "`benchmarks/*.py`",
        "[x](nowhere.md)",
        "[x](../README.md#thrice-3)",
        "[x](../README.md#no)",
        "[x](#x)",
    ],
)
def test_a_document_that_points_nowhere_fails(curriculum, text):
    put(curriculum, "docs/b.md", text)
    assert "docs/b.md" in fails("verify_curriculum.py", curriculum, "documents")


# -- mutations

GATE = """
def enter(token, current):
    if token != current:
        raise PermissionError
    return "entered"
"""
GATE_TESTS = """
import pytest
from sovereign_agent.gate import enter

def test_a_stale_token_is_refused():
    with pytest.raises(PermissionError):
        enter(1, 2)

def test_the_current_token_enters():
    assert enter(2, 2) == "entered"

@pytest.mark.parametrize("token", [1, 2])
def test_only_the_current_token_enters(token):
    assert enter_or_not(token) == ("entered" if token == 2 else "refused")

def test_nothing():
    pass

def test_a_slow_gate():
    pytest.fail("Timeout")

def enter_or_not(token):
    try:
        return enter(token, 2)
    except PermissionError:
        return "refused"
"""
STALE, CURRENT = "test_a_stale_token_is_refused", "test_the_current_token_enters"
OPEN, SHUT = "if token > current:", "if True:"


@pytest.fixture
def gate(tmp_path):
    put(tmp_path, "pyproject.toml", '[tool.pytest]\ntestpaths = ["tests"]\n')
    put(tmp_path, "src/sovereign_agent/__init__.py", "")
    put(tmp_path, "src/sovereign_agent/gate.py", GATE)
    put(tmp_path, "tests/test_gate.py", GATE_TESTS)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


def name(root, *, line="if token != current:", becomes=OPEN, kills=STALE, twin=CURRENT):
    put(
        root,
        "scripts/mutations.toml",
        f"[[mutation]]\nfile = 'src/sovereign_agent/gate.py'\nline = '''{line}'''\nbecomes = '''{becomes}'''\n"
        f"kills = 'tests/test_gate.py::{kills}'\ntwin = 'tests/test_gate.py::{twin}'\n",
    )


def test_a_guarded_line_is_killed_and_the_tree_is_left_alone(gate):
    name(gate)
    output = passes("mutate.py", gate)
    assert "src/sovereign_agent/gate.py:3" in output
    assert "1 killed, 0 survived" in output
    assert (gate / "src/sovereign_agent/gate.py").read_text() == GATE


def test_several_lines_at_once_and_one_failing_case_of_many_are_enough(gate):
    lines = "    if token != current:\n        raise PermissionError\n"
    name(gate, line=lines, becomes="", kills="test_only_the_current_token_enters")
    passes("mutate.py", gate)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"kills": "test_nothing"}, "test_nothing passed"),
        ({"becomes": "if token != missing:"}, "failed with NameError in call"),
        ({"becomes": SHUT, "kills": "test_only_the_current_token_enters"}, "its twin"),
    ],
    ids=["unguarded", "crashes", "refuses everything"],
)
def test_a_mutant_that_is_not_killed_by_assertion_or_breaks_the_twin_survives(gate, entry, reason):
    name(gate, **entry)
    output = fails("mutate.py", gate)
    assert reason in output
    assert "0 killed, 1 survived" in output


@pytest.mark.parametrize("argument", [(), ("--check",)], ids=["run", "check"])
@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"line": "token"}, "2 times instead of once"),
        ({"line": "absent"}, "0 times instead of once"),
        ({"becomes": "if token"}, "does not compile"),
        ({"twin": "test_absent"}, "not found"),
    ],
    ids=["ambiguous", "absent", "broken", "no test"],
)
def test_an_entry_that_names_no_single_line_or_no_test_fails(gate, argument, entry, reason):
    name(gate, **entry)
    assert reason in fails("mutate.py", gate, *argument)


def test_check_runs_no_test(gate):
    name(gate, kills="test_nothing")
    assert "1 named, 0 problems" in passes("mutate.py", gate, "--check")


def test_a_test_that_fails_without_a_mutation_proves_nothing(gate):
    name(gate, kills="test_a_slow_gate")
    assert "without any mutation" in fails("mutate.py", gate)


def test_only_chooses_by_file_line_or_test(gate):
    name(gate)
    passes("mutate.py", gate, "--check", "--only", "stale")
    assert "none mentions 'elsewhere'" in fails("mutate.py", gate, "--check", "--only", "elsewhere")


def test_a_run_that_would_meet_installed_code_instead_of_the_copy_is_stopped(gate):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "mutate"],
        cwd=gate,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"PYTHONPATH": str(SCRIPTS), "MUTATE_REPORT": str(gate / "report.json")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "not from this copy" in done.stdout + done.stderr
    assert done.returncode == 4


def test_a_mutant_that_only_the_cases_on_a_server_notice_is_killed(gate):
    case = "tests/test_gate.py::test_only_the_current_token_enters"
    engines = GATE_TESTS.replace('"token", [1, 2]', '"token", [2, 1], ids=["sqlite", "postgresql"]')
    put(gate, "tests/test_gate.py", engines)
    name(gate, kills=case.partition("::")[2])
    assert "1 killed, 0 survived" in passes("mutate.py", gate)


# -- the clauses of the fence

LET_GO = '''
def let_go(connection, bay):
    """Let go. DELETE FROM bays WHERE prose = 1."""
    return connection.execute(
        "DELETE FROM bays WHERE bay = ? AND (held = 0 OR until BETWEEN 1 AND ?)"
        " AND NOT EXISTS (SELECT 1 FROM cars WHERE bay = bays.bay AND parked = 1) RETURNING bay",
        (bay,),
    )


def intend(connection):
    connection.execute("SELECT bay FROM bays WHERE bay = 2 LIMIT 1")


def look(connection):
    connection.execute("SELECT bay FROM bays WHERE bay = 3")
'''
CLAUSES = ["bay = ?", "held = 0", "until BETWEEN 1 AND ?", "bay = bays.bay", "parked = 1", "bay = 2"]


def take_away(root, *lines):
    """Name a mutation for each of these (line, becomes)."""
    entry = "[[mutation]]\nfile = 'src/sovereign_agent/effects.py'\nline = '{}'\nbecomes = '{}'\n"
    put(root, "scripts/mutations.toml", "".join(entry.format(*line) for line in lines))
    write(root, effects=LET_GO)


def dropped(clause):
    return clause, f"({clause} OR 1 = 1)"


def test_clauses_that_each_have_a_mutation_of_their_own_pass(tmp_path):
    take_away(tmp_path, *map(dropped, CLAUSES))
    assert "6 in the compare-and-sets" in passes("verify_clauses.py", tmp_path)


@pytest.mark.parametrize("bare", CLAUSES)
def test_a_clause_that_no_mutation_takes_away_fails(tmp_path, bare):
    take_away(tmp_path, *[dropped(clause) for clause in CLAUSES if clause != bare])
    output = fails("verify_clauses.py", tmp_path)
    assert repr(bare) in output
    assert "1 problems" in output


def test_a_mutation_that_takes_two_clauses_at_once_stands_for_neither(tmp_path):
    together = ("bay = bays.bay AND parked = 1", "1 = 1 AND 2 = 2")
    take_away(tmp_path, *map(dropped, [*CLAUSES[:3], "bay = 2"]), together)
    assert "2 problems" in fails("verify_clauses.py", tmp_path)


def test_a_reason_for_a_clause_that_is_not_there_fails(tmp_path):
    take_away(tmp_path, *map(dropped, CLAUSES))
    write(tmp_path, relay="")
    assert "EQUIVALENT" in fails("verify_clauses.py", tmp_path)


# -- the virtual environment


def make_venv(*arguments, **options):
    command = [str(SCRIPTS / "make_venv"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_a_python_that_only_has_the_name_is_passed_over_and_a_half_made_environment_is_made_anew(tmp_path):
    for fake in ("python3.14", "python3.13"):
        put(tmp_path, f"bin/{fake}", "#!/bin/sh\nexit 127\n").chmod(0o755)
    (tmp_path / "bin" / "python3").symlink_to(sys._base_executable)
    half_made = put(tmp_path, "venv/half-made", "")
    made = make_venv(half_made.parent, env={"PATH": f"{tmp_path / 'bin'}:{os.defpath}"})
    assert made.returncode == 0, made.stderr
    assert not half_made.exists()
    subprocess.run([str(tmp_path / "venv/bin/python"), "-m", "pip", "--version"], capture_output=True, check=True)


def test_without_a_fit_python_the_message_says_what_to_do(tmp_path):
    made = make_venv(tmp_path / "venv", "no-such-python")
    assert made.returncode == 1
    assert "make PYTHON=" in made.stderr
    assert not (tmp_path / "venv").exists()
