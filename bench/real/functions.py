"""Forty short Python functions to complete, with tests, and few-shot examples to precede them.

All were written for this benchmark. `MODULE` is the beginning of a file; each problem adds a signature and a docstring,
and the model writes the body. `completion` asks for bodies and runs them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One function.

    Attributes:
        head: signature, as ``name(arguments)``.
        says: its docstring.
        checks: expressions that are true for a correct function.
    """

    head: str
    says: str
    checks: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """Everything before the body."""
        return f'def {self.head}:\n    """{self.says}"""\n'


MODULE = '''"""Small helpers for numbers, words and lists."""


def average(values):
    """Return the mean of a list of numbers, or 0.0 for an empty list."""
    if not values:
        return 0.0
    return sum(values) / len(values)


def initials(name):
    """Return the first letters of the words of a name, in upper case: "ada lovelace" gives "AL"."""
    return "".join(word[0].upper() for word in name.split())


def chunked(items, size):
    """Split a list into lists of at most `size` items, in order."""
    return [items[i:i + size] for i in range(0, len(items), size)]


def word_lengths(text):
    """Return a dictionary from each word of a text to its length."""
    return {word: len(word) for word in text.split()}


def collatz_steps(n):
    """Return how many steps of the Collatz rule lead from n to 1."""
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps


def parse_pairs(text):
    """Parse "a=1;b=2" into {"a": 1, "b": 2}; an empty text gives an empty dictionary."""
    result = {}
    for part in text.split(";"):
        if part:
            key, value = part.split("=")
            result[key] = int(value)
    return result


def moving_sum(values, width):
    """Return the sums of all runs of `width` neighbours."""
    sums = []
    for start in range(len(values) - width + 1):
        sums.append(sum(values[start:start + width]))
    return sums


def is_sorted(values):
    """Return whether a list is in ascending order."""
    return all(a <= b for a, b in zip(values, values[1:]))


def transpose(rows):
    """Return the columns of a list of equally long rows, as lists."""
    return [list(column) for column in zip(*rows)]


def longest_line(text):
    """Return the longest line of a text, the first of them if there are several."""
    best = ""
    for line in text.splitlines():
        if len(line) > len(best):
            best = line
    return best


'''

PROBLEMS = (
    Problem("add(a, b)", "Return the sum of two numbers.", ("add(2, 3) == 5", "add(-1, 1) == 0")),
    Problem(
        "is_even(n)", "Return whether n is even.", ("is_even(4)", "not is_even(7)", "is_even(0)")
    ),
    Problem(
        "factorial(n)",
        "Return n! for n of 0 or more.",
        ("factorial(0) == 1", "factorial(1) == 1", "factorial(6) == 720"),
    ),
    Problem(
        "fibonacci(n)",
        "Return the n-th Fibonacci number; fibonacci(0) is 0 and fibonacci(1) is 1.",
        ("[fibonacci(i) for i in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]",),
    ),
    Problem(
        "reverse_string(text)",
        "Return the text backwards.",
        ("reverse_string('abc') == 'cba'", "reverse_string('') == ''"),
    ),
    Problem(
        "is_palindrome(text)",
        "Return whether a text reads the same in both directions.",
        ("is_palindrome('level')", "not is_palindrome('ab')", "is_palindrome('')"),
    ),
    Problem(
        "count_vowels(text)",
        "Return how many of the letters a, e, i, o, u a text has, in upper or lower case.",
        ("count_vowels('banana') == 3", "count_vowels('AEIOU xyz') == 5"),
    ),
    Problem(
        "largest(values)",
        "Return the largest number of a list that is not empty.",
        ("largest([3, 9, 2]) == 9", "largest([-5, -2]) == -2"),
    ),
    Problem(
        "unique(items)",
        "Return the items of a list without repetitions, in the order in which they first appear.",
        ("unique([3, 1, 3, 2, 1]) == [3, 1, 2]", "unique([]) == []"),
    ),
    Problem(
        "flatten(lists)",
        "Return the items of a list of lists as one list.",
        ("flatten([[1, 2], [], [3]]) == [1, 2, 3]", "flatten([]) == []"),
    ),
    Problem(
        "count_words(text)",
        "Return a dictionary from each word of a text to how often it occurs.",
        ("count_words('a b a') == {'a': 2, 'b': 1}", "count_words('') == {}"),
    ),
    Problem(
        "celsius_to_fahrenheit(degrees)",
        "Convert degrees Celsius to degrees Fahrenheit.",
        ("celsius_to_fahrenheit(100) == 212", "celsius_to_fahrenheit(0) == 32"),
    ),
    Problem(
        "is_prime(n)",
        "Return whether n is a prime number.",
        ("[n for n in range(20) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19]",),
    ),
    Problem(
        "gcd(a, b)",
        "Return the greatest common divisor of two positive integers.",
        ("gcd(12, 18) == 6", "gcd(7, 5) == 1", "gcd(4, 4) == 4"),
    ),
    Problem(
        "digit_sum(n)",
        "Return the sum of the decimal digits of a non-negative integer.",
        ("digit_sum(1234) == 10", "digit_sum(0) == 0"),
    ),
    Problem(
        "clamp(value, low, high)",
        "Return value, but at least low and at most high.",
        ("clamp(5, 0, 3) == 3", "clamp(-1, 0, 3) == 0", "clamp(2, 0, 3) == 2"),
    ),
    Problem(
        "squares(n)",
        "Return the squares of 1 to n as a list.",
        ("squares(4) == [1, 4, 9, 16]", "squares(0) == []"),
    ),
    Problem(
        "second_largest(values)",
        "Return the second largest of the different numbers in a list.",
        ("second_largest([4, 1, 3]) == 3", "second_largest([5, 5, 2]) == 2"),
    ),
    Problem(
        "remove_spaces(text)",
        "Return the text without its spaces.",
        ("remove_spaces(' a b  c') == 'abc'",),
    ),
    Problem(
        "title_case(text)",
        "Return a text with the first letter of every word in upper case and the others in lower case.",
        ("title_case('hELLO big world') == 'Hello Big World'",),
    ),
    Problem(
        "dot(a, b)",
        "Return the dot product of two lists of numbers of the same length.",
        ("dot([1, 2, 3], [4, 5, 6]) == 32", "dot([], []) == 0"),
    ),
    Problem(
        "merge_sorted(a, b)",
        "Merge two sorted lists into one sorted list.",
        ("merge_sorted([1, 4], [2, 3, 9]) == [1, 2, 3, 4, 9]", "merge_sorted([], [1]) == [1]"),
    ),
    Problem(
        "invert(mapping)",
        "Return a dictionary from the values of a dictionary to its keys.",
        ("invert({'a': 1, 'b': 2}) == {1: 'a', 2: 'b'}",),
    ),
    Problem(
        "to_binary(n)",
        "Return a non-negative integer in binary, without a prefix: 5 gives '101'.",
        ("to_binary(5) == '101'", "to_binary(0) == '0'", "to_binary(8) == '1000'"),
    ),
    Problem(
        "from_binary(text)",
        "Return the integer that a text of 0 and 1 says in binary: '101' gives 5.",
        ("from_binary('101') == 5", "from_binary('0') == 0"),
    ),
    Problem(
        "count_occurrences(items, item)",
        "Return how often item is in a list.",
        ("count_occurrences([1, 2, 1], 1) == 2", "count_occurrences([], 3) == 0"),
    ),
    Problem(
        "are_anagrams(a, b)",
        "Return whether two words have the same letters, ignoring case.",
        ("are_anagrams('Listen', 'silent')", "not are_anagrams('ab', 'abb')"),
    ),
    Problem(
        "running_total(values)",
        "Return the list of sums of the first 1, 2, 3, ... numbers.",
        ("running_total([1, 2, 3]) == [1, 3, 6]", "running_total([]) == []"),
    ),
    Problem(
        "fizzbuzz(n)",
        "Return 'FizzBuzz' if n is divisible by 15, 'Fizz' if by 3, 'Buzz' if by 5, else n as a text.",
        ("[fizzbuzz(n) for n in (3, 5, 30, 7)] == ['Fizz', 'Buzz', 'FizzBuzz', '7']",),
    ),
    Problem(
        "is_leap_year(year)",
        "Return whether a year of the Gregorian calendar is a leap year.",
        (
            "is_leap_year(2024)",
            "not is_leap_year(1900)",
            "is_leap_year(2000)",
            "not is_leap_year(2023)",
        ),
    ),
    Problem(
        "evens(values)",
        "Return the even numbers of a list, in order.",
        ("evens([1, 2, 4, 5]) == [2, 4]", "evens([]) == []"),
    ),
    Problem(
        "longest_word(text)",
        "Return the longest word of a text, the first of them if there are several.",
        ("longest_word('a bbb cc ddd') == 'bbb'",),
    ),
    Problem(
        "rotate_left(items, n)",
        "Return a list rotated to the left by n places, for n of 0 to its length.",
        ("rotate_left([1, 2, 3, 4], 1) == [2, 3, 4, 1]", "rotate_left([1, 2], 0) == [1, 2]"),
    ),
    Problem(
        "binary_search(values, target)",
        "Return the index of target in a sorted list, or -1 if it is not there.",
        (
            "binary_search([1, 3, 5, 7], 5) == 2",
            "binary_search([1, 3], 2) == -1",
            "binary_search([], 1) == -1",
        ),
    ),
    Problem(
        "power(base, exponent)",
        "Return base to the power of a non-negative integer exponent.",
        ("power(2, 10) == 1024", "power(5, 0) == 1"),
    ),
    Problem(
        "swap_case(text)",
        "Return a text with upper case letters in lower case and the other way round.",
        ("swap_case('aBc1') == 'AbC1'",),
    ),
    Problem(
        "common_items(a, b)",
        "Return the sorted list of the different items that are in both lists.",
        ("common_items([3, 1, 2, 3], [3, 2, 9]) == [2, 3]", "common_items([1], [2]) == []"),
    ),
    Problem(
        "absolute_difference(a, b)",
        "Return how far apart two numbers are.",
        ("absolute_difference(3, 8) == 5", "absolute_difference(8, 3) == 5"),
    ),
    Problem(
        "median(values)",
        "Return the median of a list of numbers; of an even count, the mean of the middle two.",
        ("median([3, 1, 2]) == 2", "median([4, 1, 3, 2]) == 2.5"),
    ),
    Problem(
        "caesar(text, shift)",
        "Shift each lower case letter of a text by `shift` places, from z on to a; leave all else.",
        ("caesar('abz', 1) == 'bca'", "caesar('a b!', 2) == 'c d!'"),
    ),
)
