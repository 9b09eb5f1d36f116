// What OpenAI's npm client gets from the API at argv[2], as JSON. argv[3]: the folder with node_modules.
import { createRequire } from 'node:module';

const [url, folder] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)('openai');
const client = new OpenAI({ baseURL: url, apiKey: 'unused', maxRetries: 0 });
const messages = [{ role: 'user', content: 'What is 12 + 30?' }];
const parameters = { type: 'object', properties: { x: { type: 'integer' } }, required: ['x'] };
const tools = [{ type: 'function', function: { name: 'double', parameters } }];

const asked = { model: 'cascade', messages, temperature: 0, max_tokens: 12 };
const whole = await client.chat.completions.create(asked);
let streamed = '';
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? '';
}

const turns = [...messages];
const first = await client.chat.completions.create({ model: 'large', temperature: 0, messages, tools, tool_choice: 'required' });
const calls = first.choices[0].message.tool_calls;
turns.push(first.choices[0].message);
for (const call of calls) turns.push({ role: 'tool', tool_call_id: call.id, content: '8' });
const final = await client.chat.completions.create({ model: 'large', temperature: 0, messages: turns, tools, tool_choice: 'none' });

const response = await client.responses.create({ model: 'cascade', input: 'What is 12 + 30?', temperature: 0, max_output_tokens: 12 });
console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  streamed,
  arguments: calls.map((call) => JSON.parse(call.function.arguments)),
  final: final.choices[0].message.content,
  response: response.output_text,
}));
