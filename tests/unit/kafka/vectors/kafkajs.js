// Prints the partition of each key by kafkajs: as main.go. Needs `npm install kafkajs`.
const { Partitioners } = require("kafkajs");
const partitions = new Array(Number(process.argv[2])).fill(0).map((_, partitionId) => ({ partitionId, leader: 0 }));
const place = Partitioners.DefaultPartitioner();
const legacy = Partitioners.LegacyPartitioner();
console.log("kafkajs,kafkajs LegacyPartitioner");
const keys = require("fs").readFileSync(0, "utf8").trimEnd().split("\n");
const of = (key) => ({ topic: "t", partitionMetadata: partitions, message: { key: Buffer.from(key, "hex") } });
process.stdout.write(keys.map((key) => `${place(of(key))},${legacy(of(key))}\n`).join(""));
