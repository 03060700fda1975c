// Load a GGUF file in llama.cpp and print JSON: the token ids of each text, and the mean loss of given token ids.
//
//     node llama_cpp.mjs MODULE MODEL.gguf TEXTS.json ROWS.json
//
// MODULE is the folder of node-llama-cpp. TEXTS.json is a list of strings, ROWS.json a list of lists of token ids.

import fs from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const [module, file, texts, rows] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(path.join(module, "dist", "index.js")).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath: file});
const read = (name) => JSON.parse(fs.readFileSync(name, "utf8"));
const ids = read(texts).map((text) => Array.from(model.tokenize(text, true)));

let loss = 0, tokens = 0;
for (const row of read(rows)) {
    const context = await model.createContext({contextSize: row.length, batchSize: row.length, threads: 1});
    const asked = row.map((token, at) => at < row.length - 1 ? [token, {generateNext: {probabilities: true}}] : token);
    const answers = await context.getSequence().controlledEvaluate(asked);
    for (let at = 0; at + 1 < row.length; at++) {
        loss -= Math.log(answers[at].next.probabilities.get(row[at + 1]));
        tokens++;
    }
    await context.dispose();
}
const facts = model.fileInfo.metadata.tokenizer;
console.log(JSON.stringify({ids, loss: loss / tokens, tokens, chat_template: facts.chat_template ?? null}));
process.exit(0);
