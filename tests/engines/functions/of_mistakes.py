"""Reward functions with mistakes: some that no response can cure, and some that another response may cure."""

import ast
import importlib
import json
import math
import re
import string
from collections import Counter

import of_helpers

KEY = "answr"
POINTS = {"film": 1.0}


# What no response can cure: of a row as `row`.


def misspelt_key(row):
    return float(row["answr"] == row["response"])


def misspelt_key_of_the_file(row):
    return float(row[KEY] == row["response"])


def misspelt_key_of_a_struct(row):
    return float(row["facts"]["yer"])


def misspelt_key_in_a_list(row):
    return sum(1.0 for word in row["words"] if word in row["facts"]["list"][0]["nam"])


def misspelt_key_in_a_helper(row):
    return of_helpers.reads_answr(dict(row))


def misspelt_name(row):
    return float(len(reponse))  # noqa: F821


def misspelt_name_in_a_branch(row):
    return 1.0 if row["number"] == 3 else nothing_of_this_name  # noqa: F821


def misspelt_attribute_of_a_module(row):
    return math.sqroot(len(row["response"]))


def attribute_for_a_key(row):
    return float(row.answer == row["response"])


def misspelt_method_of_the_response(row):
    return float(len(row["response"].splitt()))


def one_argument_too_many(row):
    return of_helpers.length(row["response"], 3)


def missing_package(row):
    import no_such_package

    return no_such_package.score(row)


def missing_package_of_a_package(row):
    import of_a_missing_package

    return of_a_missing_package.score(row)


def missing_name_of_a_module(row):
    from math import sqroot

    return sqroot(2)


async def misspelt_key_while_waiting(row):
    return [truth == row["response"] for truth in row["answr"]]


def wrapped(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@wrapped
def wrapped_with_two_arguments(row, other):
    return 0.0


NEVER = {
    misspelt_key: "row",
    misspelt_key_of_the_file: "row",
    misspelt_key_of_a_struct: "row",
    misspelt_key_in_a_list: "row",
    misspelt_key_in_a_helper: "row",
    misspelt_key_while_waiting: "row",
    misspelt_name: "code",
    misspelt_name_in_a_branch: "code",
    misspelt_attribute_of_a_module: "code",
    attribute_for_a_key: "code",
    misspelt_method_of_the_response: "code",
    one_argument_too_many: "code",
    missing_package: "code",
    missing_package_of_a_package: "code",
    missing_name_of_a_module: "code",
}


# What another response may cure.


def key_of_parsed_text(row):
    return {"film": 1.0}[row["response"]]


def written_key_of_parsed_text(row):
    return dict(zip(row["response"].split(), row["words"], strict=False))["answer"]


def written_key_of_json(row):
    return json.loads('{"said": "' + row["response"] + '"}')["answer"]


def key_of_a_struct_by_the_response(row):
    return row["facts"][row["response"].split()[0]]


def key_of_a_struct_by_a_default(row):
    said = re.search("year|list", row["response"])
    return row["facts"][said.group() if said else "unknown"]


def column_by_the_response(row):
    return row[row["response"].split()[-1]]


def points_of_a_word(row):
    return POINTS[row["response"]]


def evaluated_response(row):
    return eval(row["response"].split()[0])


def executed_response(row):
    exec("import no_such_package")
    return 0.0


def executed_call(row):
    return eval("len(1, 2)")


def no_number_found(row):
    return float(re.search(r"\d+", row["response"]).group())


def no_code_in_it(row):
    return float(ast.literal_eval(row["response"]))


def attribute_by_the_response(row):
    return getattr(math, row["response"].split()[0])


def module_by_the_response(row):
    return importlib.import_module(row["response"].split()[0])


def as_many_arguments_as_words(row):
    return of_helpers.length(*row["response"].split())


def function_by_the_response(row):
    chosen = {"a": len}.get(row["response"], of_helpers.three)
    return chosen(row["response"])


def bound_in_a_branch(row):
    if row["response"].isdigit():
        value = 1.0
    return value


def bound_outside_in_a_branch(row):
    def inner():
        return value

    if row["response"].isdigit():
        value = 1.0
    return inner()


def divides(row):
    return 1 / Counter(row["response"])["€"]


def a_column_without_a_value(row):
    return row["nothing"].strip()


def template(row):
    return string.Template("$said").substitute(dict(row))


MAYBE = (
    *(key_of_parsed_text, written_key_of_parsed_text, written_key_of_json, key_of_a_struct_by_the_response),
    *(key_of_a_struct_by_a_default, column_by_the_response, points_of_a_word, evaluated_response, executed_response),
    *(executed_call, no_number_found, no_code_in_it, attribute_by_the_response, module_by_the_response),
    *(as_many_arguments_as_words, function_by_the_response, bound_in_a_branch, bound_outside_in_a_branch, divides),
    *(a_column_without_a_value, template),
)


# Of other signatures.


def trl_column(completions, **columns):
    return [float(truth == said) for truth, said in zip(columns["answr"], completions, strict=True)]


def trl_passed_on(completions, **columns):
    return of_helpers.reads_answr(columns)


def trl_message(completions, **columns):
    return [float(len(completion[0]["contnt"])) for completion in completions]


def trl_of_the_text(completions, **columns):
    return [{"film": 1.0}[completion[0]["content"]] for completion in completions]


def verl_extra(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info["indx"])


def verl_of_the_text(data_source, solution_str, ground_truth, extra_info=None):
    return {"film": 1.0}[solution_str]


def entry_key(answer, entry):
    return float(entry["metadata"]["dificulty"])


def entry_of_the_text(answer, entry):
    return float(entry["metadata"][answer])


OF_SIGNATURES = (
    *(("trl", trl_column, "row"), ("trl", trl_passed_on, "row"), ("trl", trl_message, "row")),
    *(("trl", trl_of_the_text, "response"), ("verl", verl_extra, "row"), ("verl", verl_of_the_text, "response")),
    *(("reasoning_gym", entry_key, "row"), ("reasoning_gym", entry_of_the_text, "response")),
)
