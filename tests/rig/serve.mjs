// Answer chats by a GGUF file in llama.cpp, greedily, and print JSON: the prompt and the answer of each chat, once by
// the chat template in the file, and once by a template in Go's language, as of a Modelfile.
//
//     node serve.mjs MODULES MODEL.gguf ASKED.json
//
// MODULES is a folder of node_modules with node-llama-cpp, which brings @huggingface/jinja, and
// @evertdespiegeleer/go-template. ASKED.json has `chats`, and `template` and `stops` of the Modelfile.

import fs from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const [modules, file, asked] = process.argv.slice(2);
const load = (...names) => import(pathToFileURL(path.join(modules, ...names)).href);
const {getLlama} = await load("node-llama-cpp", "dist", "index.js");
const {Template} = await load("@huggingface", "jinja", "dist", "index.js");
const {parse} = await load("@evertdespiegeleer", "go-template", "dist", "main.js");
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath: file});
const {chats, template, stops} = JSON.parse(fs.readFileSync(asked, "utf8"));
const facts = model.fileInfo.metadata.tokenizer;
const text = (id) => id == null ? "" : facts.ggml.tokens[id];
const bos = text(facts.ggml.bos_token_id);

async function answer(prompt) {
    const tokens = model.tokenize((model.tokens.shouldPrependBosToken ? bos : "") + prompt, true);
    const context = await model.createContext({contextSize: 256, batchSize: 256, threads: 1});
    const made = [];
    for await (const token of context.getSequence().evaluate(tokens, {temperature: 0})) {
        if (model.isEogToken(token) || stops.includes(model.detokenize([token], true)) || made.length >= 16)
            break;
        made.push(token);
    }
    await context.dispose();
    return {prompt, answer: model.detokenize(made)};
}

const found = {file: [], modelfile: []};
for (const messages of chats) {
    const values = {messages, add_generation_prompt: true, bos_token: bos, eos_token: text(facts.ggml.eos_token_id)};
    const own = new Template(facts.chat_template).render(values);
    found.file.push(await answer(own.startsWith(bos) ? own.slice(bos.length) : own));
    const Messages = messages.map(({role, content}) => ({Role: role, Content: content}));
    const System = Messages.filter(({Role}) => Role === "system").map(({Content}) => Content).join("\n\n");
    found.modelfile.push(await answer(await parse(template, {System, Messages})));  // what Ollama gives a template
}
console.log(JSON.stringify(found));
process.exit(0);
