// Prints the partition of each key by Go clients: a key in hex on each line of standard input, and on each line of
// standard output one partition for each of the columns. The argument is the number of partitions.
package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"strconv"

	"github.com/IBM/sarama"
	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	partitions, err := strconv.Atoi(os.Args[1])
	if err != nil {
		panic(err)
	}
	all := make([]int, partitions)
	for i := range all {
		all[i] = i
	}
	defaults := sarama.NewConfig().Producer.Partitioner("t")
	murmur2, crc32 := sarama.NewMurmur2Partitioner("t"), sarama.NewConsistentCRCHashPartitioner("t")
	// The partitioner of a client without the option RecordPartitioner. It asks for queue lengths for records without a key.
	franz := kgo.UniformBytesPartitioner(64<<10, true, true, nil).ForTopic("t").(kgo.TopicBackupPartitioner)
	segment := []kafka.Balancer{&kafka.Hash{}, &kafka.CRC32Balancer{}, &kafka.Murmur2Balancer{}}
	lines, out := bufio.NewScanner(os.Stdin), bufio.NewWriter(os.Stdout)
	defer out.Flush()
	fmt.Fprintln(out, "sarama,sarama murmur2,sarama crc32,franz-go,kafka-go Hash,kafka-go CRC32Balancer,kafka-go Murmur2Balancer")
	for lines.Scan() {
		key, err := hex.DecodeString(lines.Text())
		if err != nil {
			panic(err)
		}
		for _, p := range []sarama.Partitioner{defaults, murmur2, crc32} {
			partition, err := p.Partition(&sarama.ProducerMessage{Key: sarama.ByteEncoder(key)}, int32(partitions))
			if err != nil {
				panic(err)
			}
			fmt.Fprintf(out, "%d,", partition)
		}
		fmt.Fprint(out, franz.PartitionByBackup(&kgo.Record{Key: key}, partitions, nil))
		for _, balancer := range segment {
			fmt.Fprintf(out, ",%d", balancer.Balance(kafka.Message{Key: key}, all...))
		}
		fmt.Fprintln(out)
	}
}
