"""What functions in of_mistakes.py call."""


def reads_answr(row):
    return float(row["answr"])


def length(text):
    return float(len(text))


def three(one, two, three):
    return 3.0
