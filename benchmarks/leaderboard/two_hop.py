"""Questions in two steps whose intermediate the text never states: "the language of the country where Munich lies".

Items are built from two tables: places and other things of a country, and facts about a country. The intermediate is
the country. An item counts for a model if its most probable next token begins the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import layerjump as lj
from layerjump.errors import BadText
from layerjump.lens.concepts import concept_ids
from layerjump.lens.lens import read_trajectories

COUNTRIES = {
    # country: cities and sights, what people call themselves or speak, currency, capital, continent
    "France": (("Lyon", "Marseille", "Bordeaux", "the Louvre", "Versailles"), "French", "euro", "Paris", "Europe"),
    "Germany": (("Munich", "Hamburg", "Cologne", "Frankfurt", "Stuttgart"), "German", "euro", "Berlin", "Europe"),
    "Italy": (("Venice", "Milan", "Naples", "Florence", "Pisa"), "Italian", "euro", "Rome", "Europe"),
    "Spain": (("Barcelona", "Seville", "Valencia", "Granada", "Bilbao"), "Spanish", "euro", "Madrid", "Europe"),
    "Japan": (("Osaka", "Kyoto", "Hiroshima", "Nagasaki", "Mount Fuji"), "Japanese", "yen", "Tokyo", "Asia"),
    "China": (("Shanghai", "Guangzhou", "Shenzhen", "Wuhan", "Tibet"), "Chinese", "yuan", "Beijing", "Asia"),
    "Russia": (("Saint Petersburg", "Vladivostok", "Kazan", "Siberia"), "Russian", "ruble", "Moscow", "Europe"),
    "India": (("Mumbai", "Kolkata", "Chennai", "the Taj Mahal", "Bangalore"), "Hindi", "rupee", "New", "Asia"),
    "Egypt": (("Alexandria", "Luxor", "Giza", "the Sphinx"), "Arabic", "pound", "Cairo", "Africa"),
    "Greece": (("Thessaloniki", "Delphi", "Crete", "the Acropolis"), "Greek", "euro", "Athens", "Europe"),
    "Turkey": (("Istanbul", "Izmir", "Cappadocia", "Hagia Sophia"), "Turkish", "lira", "Ankara", "Asia"),
    "Brazil": (("Rio de Janeiro", "Salvador", "Recife"), "Portuguese", "real", "Bras", "South"),
    "Portugal": (("Porto", "Madeira", "Sintra"), "Portuguese", "euro", "Lisbon", "Europe"),
    "Poland": (("Krakow", "Gdansk", "Wroclaw", "Auschwitz"), "Polish", "z", "Warsaw", "Europe"),
    "Sweden": (("Gothenburg", "Malmo", "Uppsala"), "Swedish", "kron", "Stockholm", "Europe"),
    "Norway": (("Bergen", "Trondheim", "Stavanger"), "Norwegian", "kron", "Oslo", "Europe"),
    "Denmark": (("Aarhus", "Odense", "Legoland"), "Danish", "kron", "Copenhagen", "Europe"),
    "Korea": (("Busan", "Incheon", "Daegu"), "Korean", "won", "Seoul", "Asia"),
    "Thailand": (("Phuket", "Chiang Mai", "Pattaya"), "Thai", "baht", "Bangkok", "Asia"),
    "Vietnam": (("Da Nang", "Hue", "the Mekong Delta"), "Vietnamese", "dong", "Hanoi", "Asia"),
    "Mexico": (("Guadalajara", "Cancun", "Tijuana", "Monterrey"), "Spanish", "peso", "Mexico", "North"),
    "Peru": (("Cusco", "Machu Picchu", "Arequipa"), "Spanish", "sol", "Lima", "South"),
    "Canada": (("Vancouver", "Montreal", "Calgary", "Banff"), "English", "dollar", "Ottawa", "North"),
    "Australia": (("Sydney", "Melbourne", "Perth", "Brisbane"), "English", "dollar", "Canberra", "Oceania"),
    "Ireland": (("Cork", "Galway", "Limerick"), "English", "euro", "Dublin", "Europe"),
    "Kenya": (("Mombasa", "Kisumu", "the Maasai Mara"), "Sw", "shilling", "Nairobi", "Africa"),
    "Iran": (("Isfahan", "Shiraz", "Persepolis", "Tabriz"), "Persian", "rial", "Tehran", "Asia"),
    "Israel": (("Tel Aviv", "Haifa", "Masada"), "Hebrew", "shekel", "Jerusalem", "Asia"),
    "Ukraine": (("Odessa", "Lviv", "Kharkiv", "Chernobyl"), "Ukrainian", "h", "K", "Europe"),
    "Netherlands": (("Rotterdam", "Utrecht", "The Hague", "Eindhoven"), "Dutch", "euro", "Amsterdam", "Europe"),
}
QUESTIONS = (
    # column of COUNTRIES, prompt
    (1, "The main language spoken in the country where {} is located is"),
    (1, "People who live near {} usually speak"),
    (2, "The currency used in the country where {} is located is the"),
    (3, "The capital of the country where {} is located is"),
    (3, "The government of the country where {} is located sits in the city of"),
    (4, "The country where {} is located lies on the continent of"),
)


@dataclass(frozen=True)
class Item:
    """A question, the country it leads through, and the beginning of its answer."""

    start: str
    """The question up to the place and with it; what follows can hold the intermediate."""
    prompt: str
    intermediate: str
    answer: str


def items() -> list[Item]:
    """All items: each place with each question; none whose text names the country."""
    built = [
        Item(question.partition("{}")[0] + place, question.format(place), country, str(facts[column]))
        for country, facts in COUNTRIES.items()
        for column, question in QUESTIONS
        for place in facts[0]
    ]
    return [item for item in built if item.intermediate not in item.prompt and item.intermediate != item.answer]


def answered(model: lj.Model, asked: list[Item]) -> list[Item]:
    """The items whose answer begins with the model's most probable next token, and whose intermediate is one token."""
    readings = read_trajectories(
        {"model": lj.Lens(model)}, [item.prompt for item in asked], k=1, levels=[model.n_blocks], last=1
    )
    tops = [model.token_texts([int(by_lens["model"].top[0, 0, 0])])[0].strip() for by_lens in readings]
    return [
        item
        for item, top in zip(asked, tops, strict=True)
        if top and item.answer.startswith(top) and _is_one_token(model, item.intermediate)
    ]


def _is_one_token(model: lj.Model, word: str) -> bool:
    try:
        return bool(concept_ids(model, [word]))
    except BadText:
        return False


@torch.no_grad()
def best_rank(lenses: dict[str, lj.Lens], levels: tuple[int, ...], item: Item, words: list[str]) -> dict[str, Tensor]:
    """For each lens the rank, from 0, that it gives each word at its best level and position from the place on."""
    model = next(iter(lenses.values())).model
    tokenization = model.tokenization
    start, ids = (tokenization.wrap_prompt(tokenization.encode([text])[0]) for text in (item.start, item.prompt))
    batch = lj.batch_from_ids(ids)
    (states,) = lj.capture_states(model, [batch], levels)
    sets = [torch.tensor(concept_ids(model, [word])) for word in words]
    ranks = {}
    for name, lens in lenses.items():
        logits = torch.cat([lens.logits(level, states[level][len(start) - 1 :]).float() for level in levels])
        best = [(logits > logits[:, ids_of_word].max(1, keepdim=True).values).sum(1).min() for ids_of_word in sets]
        ranks[name] = torch.stack(best)
    return ranks
