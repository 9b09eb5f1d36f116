"""Names, things, and questions about prices, which several tasks share."""

NAMES = (
    "Anna", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Ida", "Jack", "Kate", "Leo", "Mia", "Nick", "Olga",
    "Paul", "Rosa", "Sam", "Tina", "Umar", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "pears", "plums", "eggs", "books", "pens", "cups", "coins", "stamps", "cards", "balls", "shells", "nuts",
    "keys", "stones", "cakes", "roses", "boxes", "hats", "rolls",
)  # fmt: skip
ASK_ONE = (
    "[What is the price of|How much is|What does the table say for|Look up|What is the value for|Price of] {a}[?|.]",
)
ASK_MANY = (
    "[What do|How much do] {n} {a} cost?", "[What is the price of|Give the price of|How much are] {n} {a}?",
    "[I buy|Someone buys] {n} {a}. How much is that?",
)  # fmt: skip
ASK_TWO = (
    "[What do|How much do] {n} {a} and {m} {b} cost[ together|]?",
    "[I buy|Someone buys] {n} {a} and {m} {b}. How much is that?",
    "[Give|Find|What is] the [total|price|cost] of {n} {a} and {m} {b}[.|?]",
)  # fmt: skip
