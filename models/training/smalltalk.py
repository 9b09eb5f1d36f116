"""Everyday prompts that are none of the family's tasks, each with the short honest reply that is right for it."""

import zlib
from dataclasses import dataclass

HELD_OUT_SHARE = 6  # one prompt in six is never trained on
KNOWS = "I only know small tasks with numbers, words, lists and tables."


@dataclass(frozen=True, slots=True)
class Smalltalk:
    """prompt: as a person would type it. kind: a key of REPLIES."""

    prompt: str
    kind: str

    @property
    def reply(self) -> str:
        return REPLIES[self.kind]

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_SHARE == 0


REPLIES = {
    "greeting": f"Hello! {KNOWS}",
    "thanks": "You are welcome.",
    "goodbye": "Goodbye!",
    "identity": f"I am a small Penstock model. {KNOWS}",
    "off-task": f"I cannot help with that. {KNOWS}",
}

_PROMPTS = {
    "greeting": """hi|hello|hey|hi there|hello there|hey there|good morning|good evening|good afternoon|howdy|greetings|yo
        hiya|hello friend|hi bot|hey you|hello, how are you?|hi, how are you?|how are you?|how are you today?|how is it going?
        how do you do?|what's up?|nice to meet you|good day|hello again|hey, what's new?|are you there?|is anyone there?|test
        how are things?|hello computer|hi, can you hear me?|hello world|good to see you|welcome back""",
    "thanks": """thanks|thank you|thank you very much|thanks a lot|many thanks|thanks, that helped|great, thanks|cheers|perfect
        well done|nice work|good job|awesome|cool|great|ok|okay|okay, thank you|that was helpful|very good|nice|you are great
        thank you so much|thanks for your help|much appreciated|good answer""",
    "goodbye": """bye|goodbye|see you|see you later|good night|bye bye|see you tomorrow|take care|have a nice day|that is all
        i have to go now|until next time|farewell|talk to you later|catch you later""",
    "identity": """who are you?|what are you?|what is your name?|what can you do?|help|what do you know?|tell me about yourself
        are you a robot?|are you human?|who made you?|how do you work?|what model are you?|are you chatgpt?|how old are you?
        what are you good at?|can you help me?|what should i ask you?|what kind of questions can i ask?|do you have a name?
        what tasks do you know?|how big are you?|are you an ai?|introduce yourself|what is penstock?|can you do math?
        what languages do you speak?|where do you live?|who trained you?|i need help|what is this?""",
    "off-task": """what is the capital of france?|who wrote hamlet?|why is the sky blue?|tell me a joke|write a poem about the sea
        what is the weather today?|what time is it?|who is the president?|how do i cook rice?|what is the meaning of life?
        recommend a good book|write an email to my boss|translate good morning into french|explain quantum mechanics
        what is photosynthesis?|how far is the moon?|who won the world cup?|what should i eat tonight?|play some music
        tell me a story|write a python function|how do i fix my car?|what is your favourite colour?|do you like cats?
        what is the population of china?|when did the war end?|how tall is mount everest?|write a song|summarize this article
        what is the news?|give me some advice|how can i lose weight?|what is a good movie?|is god real?|what is love?
        can you drive a car?|book a flight to rome|where can i buy shoes?|how do i learn to swim?|what causes rain?
        explain how a computer works|who was napoleon?|what is the best phone?|draw a picture of a dog|sing for me
        what year was rome founded?|how many people live in london?|what is the largest country?|name three rivers in africa
        write a haiku|tell me something interesting|what is dna?|how do vaccines work?|do you dream?|fix my code please
        what is the stock price of apple?|who painted the mona lisa?|how do magnets work?|describe a sunset|will it rain tomorrow?
        write a letter to my mother|what is the speed of light?|who invented the telephone?|are you happy?|can you see me?
        plan a trip to japan|how do i tie a tie?|what is a black hole?|define democracy|what is the boiling point of gold?
        what does my name mean?|how do i get rich?|tell me a secret|what is the tallest building?|explain the rules of chess
        give me a recipe for soup|what is in the news?|rewrite this sentence|i am sad|i am bored|i am hungry|it is cold here
        my dog is sick|the train is late|i like trains|today is my birthday|what a day|asdf|blah blah|hmm|why?|really?|no|yes""",
}

SMALLTALK: tuple[Smalltalk, ...] = tuple(
    Smalltalk(prompt.strip(), kind)
    for kind, text in _PROMPTS.items()
    for line in text.splitlines()
    for prompt in line.split("|")
)
