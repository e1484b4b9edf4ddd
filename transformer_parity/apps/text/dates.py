"""A small generated translation task: convert human-readable dates to ISO 8601.

Every date string has exactly one correct translation. The following rules resolve ambiguous formats:

- If a date starts with a four-digit year, the month comes next and the day comes last, regardless of the separators.
- Otherwise, the day comes first if the separators are dots or hyphens, and the month comes first if they are slashes.
- A two-digit year is always last and stands for a year from 1970 to 2069. Only days in these years are written with
  two-digit years.

All dates are in the years 1900 to 2099. Ten percent of the days are held out, so they do not occur in the training data
in any format.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path

from transformer_spec.checks import check_integer

# A model for this task, trained with `parity train --task dates --backend torch`. The model correctly translates 99.9%
# of the held-out dates.
SHIPPED = Path(str(files("transformer_parity") / "data" / "dates.safetensors"))

FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
TWO_DIGIT_YEARS = range(1970, 2070)
HELD_OUT = 10  # on average, one day in ten is held out
SPACED = 0.1  # fraction of dates with an extra space next to a word or separator

_NUMBERS = tuple(str(n) for n in range(1, 32))


@dataclass(frozen=True)
class Language:
    """A language's words for months, weekdays, and days of the month. The default values are numbers.

    Attributes:
        months: Names of the months, starting with January.
        short_months: Abbreviations of the months.
        weekdays: Names of the weekdays, starting with Monday.
        short_weekdays: Abbreviations of the weekdays.
        ordinals: Days of the month as ordinal numerals, such as 1st.
        day_words: Days of the month in words.
    """

    months: tuple[str, ...] = _NUMBERS
    short_months: tuple[str, ...] = _NUMBERS
    weekdays: tuple[str, ...] = _NUMBERS
    short_weekdays: tuple[str, ...] = _NUMBERS
    ordinals: tuple[str, ...] = _NUMBERS
    day_words: tuple[str, ...] = _NUMBERS


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_DIGITS = _words("one two three four five six seven eight nine")
_TEENS = _words("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_BELOW_100 = ("", *_DIGITS, *_TEENS, *(tens + ones for tens in _TENS for ones in ("", *(f"-{n}" for n in _DIGITS))))


def _english_ordinal(n: int) -> str:
    return f"{n}th" if n in (11, 12, 13) else str(n) + {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")


def _english_year(year: int) -> str:
    """Return a year in words, such as nineteen oh five, nineteen eighty-four, two thousand and four, or twenty ten."""
    hundreds, rest = divmod(year, 100)
    if hundreds == 20 and rest < 10:
        return f"two thousand and {_BELOW_100[rest]}" if rest else "two thousand"
    if rest < 10:
        return f"{_BELOW_100[hundreds]} oh {_BELOW_100[rest]}" if rest else f"{_BELOW_100[hundreds]} hundred"
    return f"{_BELOW_100[hundreds]} {_BELOW_100[rest]}"


_ENGLISH_DAYS = _words(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth twenty-first twenty-second twenty-third twenty-fourth "
    "twenty-fifth twenty-sixth twenty-seventh twenty-eighth twenty-ninth thirtieth thirty-first"
)
_GERMAN_DAYS = _words(
    "erste zweite dritte vierte fünfte sechste siebte achte neunte zehnte elfte zwölfte dreizehnte vierzehnte "
    "fünfzehnte sechzehnte siebzehnte achtzehnte neunzehnte zwanzigste einundzwanzigste zweiundzwanzigste "
    "dreiundzwanzigste vierundzwanzigste fünfundzwanzigste sechsundzwanzigste siebenundzwanzigste "
    "achtundzwanzigste neunundzwanzigste dreißigste einunddreißigste"
)
_FRENCH_DAYS = (
    *_words("premier deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize"),
    *("dix-sept", "dix-huit", "dix-neuf", "vingt", "vingt et un"),
    *_words("vingt-deux vingt-trois vingt-quatre vingt-cinq vingt-six vingt-sept vingt-huit vingt-neuf"),
    *("trente", "trente et un"),
)

LANGUAGES = {
    "numbers": Language(),
    "English": Language(
        _words("January February March April May June July August September October November December"),
        _words("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec"),
        _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
        _words("Mon Tue Wed Thu Fri Sat Sun"),
        tuple(_english_ordinal(n) for n in range(1, 32)),
        _ENGLISH_DAYS,
    ),
    "German": Language(
        _words("Januar Februar März April Mai Juni Juli August September Oktober November Dezember"),
        _words("Jan. Feb. März Apr. Mai Jun. Jul. Aug. Sept. Okt. Nov. Dez."),
        _words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag"),
        _words("Mo Di Mi Do Fr Sa So"),
        tuple(f"{n}." for n in _NUMBERS),
        _GERMAN_DAYS,
    ),
    "French": Language(
        _words("janvier février mars avril mai juin juillet août septembre octobre novembre décembre"),
        _words("janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc."),
        _words("lundi mardi mercredi jeudi vendredi samedi dimanche"),
        _words("lun. mar. mer. jeu. ven. sam. dim."),
        ("1er", *_NUMBERS[1:]),
        _FRENCH_DAYS,
    ),
    "Spanish": Language(
        _words("enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre"),
        weekdays=_words("lunes martes miércoles jueves viernes sábado domingo"),
    ),
    "Italian": Language(
        _words("gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre"),
        weekdays=_words("lunedì martedì mercoledì giovedì venerdì sabato domenica"),
    ),
    "Dutch": Language(
        _words("januari februari maart april mei juni juli augustus september oktober november december"),
        weekdays=_words("maandag dinsdag woensdag donderdag vrijdag zaterdag zondag"),
    ),
    "Portuguese": Language(
        _words("janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro"),
        weekdays=_words("segunda-feira terça-feira quarta-feira quinta-feira sexta-feira sábado domingo"),
    ),
}

# Date formats in each language. d and m are numbers without leading zeros, dd and mm have two digits, and yy is the
# last two digits of the year.
FORMATS = {
    "numbers": (
        "{year}-{mm}-{dd}",
        "{year}/{mm}/{dd}",
        "{year}.{mm}.{dd}",
        "{year}{mm}{dd}",
        "{dd}.{mm}.{year}",
        "{d}.{m}.{year}",
        "{d}. {m}. {year}",
        "{d}.{m}.{yy}",
        "{dd}-{mm}-{year}",
        "{mm}/{dd}/{year}",
        "{m}/{d}/{year}",
        "{m}/{d}/{yy}",
    ),
    "English": (
        "{d} {month} {year}",
        "{month} {d}, {year}",
        "{dd} {short_month} {year}",
        "{short_month} {d}, {year}",
        "{dd}-{short_month}-{year}",
        "{year} {short_month} {d}",
        "{d} {short_month} '{yy}",
        "{month} {ordinal}, {year}",
        "the {ordinal} of {month} {year}",
        "{weekday}, {month} {d}, {year}",
        "{short_weekday} {d} {short_month} {year}",
        "{month} {day_words}, {year}",
        "the {day_words} of {month} {year}",
        "the {day_words} of {month} {year_words}",
    ),
    "German": (
        "{ordinal} {month} {year}",
        "{dd}. {month} {year}",
        "{ordinal} {short_month} {year}",
        "{ordinal} {month} '{yy}",
        "{weekday}, den {ordinal} {month} {year}",
        "{short_weekday}, {dd}.{mm}.{year}",
        "der {day_words} {month} {year}",
    ),
    "French": (
        "{ordinal} {month} {year}",
        "{ordinal} {short_month} {year}",
        "le {ordinal} {month} {year}",
        "{weekday} {ordinal} {month} {year}",
        "{short_weekday} {ordinal} {short_month} {year}",
        "le {day_words} {month} {year}",
    ),
    "Spanish": ("{d} de {month} de {year}", "{weekday}, {d} de {month} de {year}"),
    "Italian": ("{d} {month} {year}", "{weekday} {d} {month} {year}"),
    "Dutch": ("{d} {month} {year}", "{weekday} {d} {month} {year}"),
    "Portuguese": ("{d} de {month} de {year}", "{weekday}, {d} de {month} de {year}"),
}


def _title(line: str) -> str:
    return " ".join(word[:1].upper() + word[1:] for word in line.split(" "))


# Half of the dates keep their original capitalization.
CASES: tuple[Callable[[str], str], ...] = (str, str, str, str.lower, str.upper, _title)


def is_held_out(day: date) -> bool:
    """Return whether a day is reserved for validation. The result depends only on the day."""
    return zlib.crc32(day.isoformat().encode()) % HELD_OUT == 0


def date_pairs(count: int, seed: int, *, held_out: bool) -> list[tuple[str, str]]:
    """Return pairs of a human-readable date and the same date in ISO 8601.

    Args:
        count: Number of pairs.
        seed: Random seed. The same seed generates the same pairs on every machine.
        held_out: If True, only held-out days are used. If False, only days that are not held out are used.
    """
    check_integer("count", count, minimum=1)
    check_integer("seed", seed, minimum=0)
    days = [day for day in _every_day() if is_held_out(day) == held_out]
    recent = [day for day in days if day.year in TWO_DIGIT_YEARS]
    formats = _all_formats()
    # Use only random(), because Python doesn't guarantee for any other method that future versions return the same
    # sequence.
    draw = random.Random(f"{seed} {held_out}").random

    pairs = []
    for _ in range(count):
        language, template = formats[int(draw() * len(formats))]
        pool = recent if "{yy}" in template else days
        day = pool[int(draw() * len(pool))]
        line = CASES[int(draw() * len(CASES))](write(day, language, template))
        if draw() < SPACED:
            places = [place.start() for place in re.finditer(r"\b|$", line)]
            place = places[int(draw() * len(places))]
            line = f"{line[:place]} {line[place:]}"
        pairs.append((line, day.isoformat()))
    return pairs


def date_lines() -> list[str]:
    """Return lines that include every character used in the task, for building the character vocabulary."""
    days = _every_day(97)  # these days include every year, month, day of the month, and weekday
    lines = [write(day, language, template) for day in days for language, template in _all_formats()]
    return [line for written in lines for line in (written, written.lower(), written.upper())]


def write(day: date, language: str, template: str) -> str:
    """Format a day in a language using a template from ``FORMATS``."""
    words = LANGUAGES[language]
    return template.format(
        d=day.day,
        dd=f"{day.day:02}",
        m=day.month,
        mm=f"{day.month:02}",
        year=day.year,
        yy=f"{day.year % 100:02}",
        month=words.months[day.month - 1],
        short_month=words.short_months[day.month - 1],
        weekday=words.weekdays[day.weekday()],
        short_weekday=words.short_weekdays[day.weekday()],
        ordinal=words.ordinals[day.day - 1],
        day_words=words.day_words[day.day - 1],
        year_words=_english_year(day.year),
    )


def _every_day(step: int = 1) -> list[date]:
    return [date.fromordinal(n) for n in range(FIRST.toordinal(), LAST.toordinal() + 1, step)]


def _all_formats() -> list[tuple[str, str]]:
    return [(language, template) for language, templates in FORMATS.items() for template in templates]
