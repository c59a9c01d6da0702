"""The page of measured models keeps the lines of cases that were not run again."""

from tests.bench.model_figures import BEGIN, CASES, END, PAGE, line, published, tables_of

MEASURED = PAGE.read_text().split(BEGIN)[1].split(END)[0]
RUN = {"auc": 0.5, "gauc": None, "samples": 100, "rows": 7, "bytes": 2e6, "core_s": 2.0}


def test_without_results_the_page_stays_as_it_is():
    assert tables_of({}, MEASURED) == MEASURED


def test_a_case_with_results_gets_its_line_and_no_other_one_changes():
    key = "criteo: deepfm"
    before, after = published(MEASURED), published(tables_of({key: [RUN]}, MEASURED))
    assert after[key] == line("deepfm", [RUN]) == "| deepfm | 0.5000 | - | 50 | 7 | 2.0 MB |" != before[key]
    assert after == before | {key: after[key]}


def test_every_case_has_a_line_of_its_own_on_the_page():
    keys = [case.key for case in CASES]
    assert sorted(keys) == sorted(set(keys)) == sorted(published(MEASURED))
